"""Tests of PaddleNLP's Trainer, in an environment of its own: ``make test-nlp``."""
