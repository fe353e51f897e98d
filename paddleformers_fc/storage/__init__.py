"""Bytes on disk and in stores: ranges in, checked files out, directories that appear as a whole or not at all.

====================  ================================================================================
``paths``             local and remote paths, names beside a checkpoint; the parsing of a user's text
``remote``            files of a store, through fsspec
``remote_writes``     files written to a store
``dtypes``            element types under their three names; casts; numbers of 8 and 4 bits with scales
``checksum``          ``FileChecksum``, and checksums computed block by block while bytes are written
``files``             the only module that writes, syncs, renames and deletes
``json_io``           bounded, strict reading of JSON
``state_json``        values of Python and numpy as exact JSON
``pickles``           pickles of other formats, parsed and written as data
``safetensors``       a validating header reader and a writer
``identities``        the files that were checked, so that a replaced one is noticed
``operations``        boxes of files, read into any strided memory
``executor``          operations carried out by several threads
``progress``          bytes that an operation has done
``block_checksums``   comparison of block checksums
``manifest``          ``flex_checkpoint.json``: content and verification of a checkpoint
``export_checksums``  ``flex_checksums.json``: checksums of an export
``commit``            staging, locks, commit, replacement and removal of directories; stale ones of crashed saves
====================  ================================================================================

No module imports Paddle.
"""
