"""Fixtures of the kernels' tests."""

from helpers.kernels.fixtures import interpreted, num_threads, paged_batch

__all__ = ["interpreted", "num_threads", "paged_batch"]
