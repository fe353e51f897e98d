"""Bytes on disk and in stores: ranges in, checked files out, directories that appear as a whole or not at all.

====================  ================================================================================
``paths``             local and remote paths, names beside a checkpoint; the parsing of a user's text
``remote``            files of a store, through fsspec
``dtypes``            element types under their three names; conversion of arrays
``checksum``          ``FileChecksum``, and checksums computed block by block while bytes are written
``files``             the only module that writes, syncs, renames and deletes
``json_io``           bounded, strict reading of JSON
``state_json``        values of Python and numpy as exact JSON
``pickles``           pickles of other formats, parsed and written as data
``safetensors``       a validating header reader and streaming writers
``ranges``            parallel reads of byte ranges of the files that were checked, by their identities
``block_scales``      8-bit matrices with block scales, read as matrices of another dtype
``prefetch``          ranges of remote files in few large requests
``regions``           boxes of a stored tensor, read into any strided array
``block_checksums``   comparison of block checksums
``staging_lock``      the process that owns a staging directory, and whether it is alive
``manifest``          ``flex_checkpoint.json``: content and verification of a checkpoint
``export_checksums``  ``flex_checksums.json``: checksums of an export
``commit``            staging, commit, replacement and removal of directories of checkpoints and exports
``leftovers``         hidden directories of crashed saves: report, cleanup, recovery
====================  ================================================================================

No module imports Paddle.
"""
