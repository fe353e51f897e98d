"""Bytes on disk and in stores: ranges in, checked files out, directories that appear as a whole or not at all.

====================  ================================================================================
``paths``             local and remote paths; the parsing of a user's text
``remote``            files of a store, through fsspec
``dtypes``, ``casts`` element types under their three names; conversion of arrays
``checksum``          checksums computed block by block while bytes are written
``file_checksums``    ``FileChecksum``: size and checksums of a finished file
``files``             the only module that writes, syncs, renames and deletes
``json_io``           bounded, strict reading of JSON
``state_json``            values of Python and numpy as exact JSON
``pickles``           pickles of other formats, parsed and written as data
``safetensors``       a validating header reader and streaming writers
``identity``          identities of files, so that the file that is read is the file that was checked
``ranges``            parallel reads of byte ranges into memory of the caller
``block_scales``      8-bit matrices with block scales, read as matrices of another dtype
``prefetch``          ranges of remote files in few large requests
``regions``           boxes of a stored tensor, read into any strided array
``block_checksums``   comparison of block checksums
``names``             names of the directories beside a checkpoint
``staging_lock``      the process that owns a staging directory, and whether it is alive
``manifest``          ``flex_checkpoint.json``: content and verification of a checkpoint
``export_checksums``  ``flex_checksums.json``: checksums of an export
``commit``            staging, commit, replacement and removal of checkpoint directories
``leftovers``         hidden directories of crashed saves: report, cleanup, recovery
``export_commit``     commit of an export, also over an older one
====================  ================================================================================

No module imports Paddle.
"""
