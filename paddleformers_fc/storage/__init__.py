"""Bytes on disks and in stores: read ranges, write files with checksums, commit directories atomically.

====================  ================================================================================
``paths``             local and remote paths; names of hidden directories next to a checkpoint
``remote``            reads files of a store, through fsspec
``remote_writes``     writes files of a store
``dtypes``            dtypes under their three names; casts; numbers of 8 and 4 bits with scales
``checksum``          ``FileChecksum``; checksums computed block by block while bytes are written
``files``             the only module that writes, syncs, renames and deletes
``json_io``           bounded, strict reading of JSON
``state_json``        Python and numpy values as exact JSON
``pickles``           pickles of other formats, parsed and written as data
``safetensors``       a validating header reader and a writer
``identities``        identities of checked files, to detect replaced files
``operations``        reads of boxes of files into strided memory
``executor``          executes operations in several threads
``progress``          bytes done by a running operation
``block_checksums``   comparison of block checksums
``manifest``          ``flex_checkpoint.json``: content and verification of a checkpoint
``export_checksums``  ``flex_checksums.json``: checksums of an export
``commit``            staging, locks, commit, replacement and removal of directories; stale directories of crashed saves
====================  ================================================================================

No module imports Paddle.
"""
