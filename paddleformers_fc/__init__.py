"""Flex checkpoints for PaddleFormers' Trainer: save once, resume under any parallel layout, export anywhere."""

__version__ = "0.1.0"
