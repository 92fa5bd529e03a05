"""The size of chunks of prompts that pass stages."""

import pytest

from tightwire.server.config.limits import chunk_rows


@pytest.mark.parametrize(("num_tokens", "num_stages"), [(1, 2), (40, 2), (512, 2), (4096, 2), (512, 4)])
def test_chunks_are_equal_and_not_too_small(num_tokens: int, num_stages: int) -> None:
    rows = chunk_rows(num_tokens, num_stages)
    num_chunks = -(-num_tokens // rows)
    assert num_chunks * rows - num_tokens < num_chunks, "the last chunk is as long as the others"
    assert num_chunks == 1 or rows >= 20
    assert num_chunks > num_stages or num_tokens < 100
