"""Formats that PaddleFormers' Trainer wrote before FlexCheckpoint: unified, hybrid-parallel and sharding_io.

They have no checksums and no record of the model, so a reader proves from their contents what is what.
"""
