"""Tensors that are not in host memory: the same tests on a fake accelerator and on a real one.

``plugin/`` is the fake one, a CustomDevice for Paddle that is compiled once; ``FLEX_TEST_DEVICE=gpu`` (``make
test-gpu``) takes a real one. Ranks run under :mod:`.running`.
"""
