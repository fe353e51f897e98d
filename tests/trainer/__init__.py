"""Tests of the seam to PaddleFormers' Trainer."""
