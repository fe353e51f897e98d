"""Formats that PaddleFormers' Trainer wrote before FlexCheckpoint: unified, hybrid-parallel and sharding_io.

They have no checksums and no description of the model, so readers derive and prove everything from their contents.
"""
