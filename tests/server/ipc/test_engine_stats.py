"""What the engine counts becomes the figures that pages and metrics show."""

import pytest

from tightwire.comm.ledger.ledger import Count
from tightwire.server.ipc.engine_stats import EngineCounters, EngineStats, ReplicaLoad


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_tokens_a_sum_are_those_of_a_replica(num_replicas: int) -> None:
    """Rank 0 counts the sums of its own replica; each of the others chooses about as many tokens with as many sums."""
    sums = [
        Count("all_reduce", "native", phase, calls, 0, 0, 0.0, 0) for phase, calls in (("decode", 40), ("prefill", 7))
    ]
    counters = EngineCounters(
        num_drafts=10, num_draft_tokens=30, num_accepted_draft_tokens=20, num_generation_tokens=80
    )
    stats = EngineStats(comm=sums, loads=[ReplicaLoad(0, 0, 1, 1)] * num_replicas, counters=counters)
    assert (stats.drafts.mean_length, stats.drafts.tokens_per_sum) == (2.0, 2.0 / num_replicas)
    assert EngineStats().drafts.tokens_per_sum is None
