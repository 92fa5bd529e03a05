"""Many calls in a row over shared memory, with more ranks than cores: no hang, no wrong sum.

10,000 calls with two ranks, 3,000 with three, 300 with eight.
"""

import pytest
from harness import run_ranks
from helpers.comm.stress_calls import alternating_calls

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(("world_size", "num_calls"), [(2, 10_000), (3, 3_000), (8, 300)])
def test_alternating_calls_end_with_the_right_sums(world_size: int, num_calls: int) -> None:
    run_ranks(world_size, alternating_calls, num_calls, world_size, timeout_s=250, shared_memory=True)
