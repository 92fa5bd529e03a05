"""Fixtures of tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank
from helpers.model.paged_batch import PagedBatch


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's thread count for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[InterpretedRank]:
    """Calls a check in a process with Triton's interpreter; a module's checks share it."""
    rank = InterpretedRank()
    yield rank
    rank.close()


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    return PagedBatch
