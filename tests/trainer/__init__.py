"""Tests of the integration into PaddleFormers' Trainer."""
