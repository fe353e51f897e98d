"""Bytes on disk: exact ranges in, checked files out, and directories that appear whole or not at all.

====================  ================================================================================
``dtypes``            element types: this package's names, safetensors' names, numpy's dtypes
``receipts``          what a writer says about a file it finished: size and checksums
``checksum``          checksums taken block by block while the bytes pass by
``files``             the only place that writes, syncs, renames and deletes
``safetensors``       a validating header reader and a streaming writer
``ranges``            parallel reads of byte ranges into memory that the caller owns
``regions``           boxes of a stored tensor, read into any strided array
``names``             how the directories beside a checkpoint are called
``owner``             which process an unfinished directory belongs to, and whether that process still lives
``manifest``          ``flex_checkpoint.json``: what a finished checkpoint consists of, and how it is checked
``export_checksums``  ``flex_checksums.json``: the checksums of an export's files
``commit``            the life of a checkpoint directory: staged, committed, replaced, cleaned up, removed
====================  ================================================================================

Each module imports only from those above it. Nothing here imports Paddle.
"""
