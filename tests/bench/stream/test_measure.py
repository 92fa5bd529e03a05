"""The cores of the ranks."""

import os

import pytest
from helpers.server.stream_bench_bodies import bind_and_look

from tightwire.bench.options import RankOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.stream.options import StreamOptions
from tightwire.comm.group.host import num_cores

EVERYWHERE = tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.skipif(len(EVERYWHERE) < 2 or num_cores() < len(EVERYWHERE), reason="not two cores of our own")
def test_ranks_are_bound_to_their_own_cores() -> None:
    with open_ranks(RankOptions(ranks=2)) as (ranks, _):
        settled = dict(ranks.stream(bind_and_look, StreamOptions(threads=1)))
    assert {threads for _, _, threads in settled.values()} == {1}
    shares = [share for share, seen, _ in settled.values() if share == seen]
    assert len(shares) == 2 and all(shares) and not set(shares[0]) & set(shares[1])


def test_a_single_rank_is_not_bound() -> None:
    with open_ranks(RankOptions(ranks=1)) as (ranks, _):
        assert dict(ranks.stream(bind_and_look, StreamOptions(threads=1))) == {0: ((), EVERYWHERE, 1)}
