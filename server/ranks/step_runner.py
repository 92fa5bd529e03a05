"""Runs the engine's steps on all ranks from rank 0: sends plans to the other ranks, runs its own, counts transfers.

Each rank gets its replica's plan, which is empty if its replica has nothing to do. Plans are sent before rank 0 runs
its own, so that all ranks enter the first collective together.
"""

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
import zmq
from torch import Tensor

from tightwire.comm.ledger.counters import Count
from tightwire.comm.ledger.ledger import Spent
from tightwire.model.build import RankGroups
from tightwire.model.cache.offloaded_cache import OffloadedCache
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.ipc.engine_stats import CacheCount, CommCount, RankCounts
from tightwire.server.ipc.messages import StopFollowing, StreamForecast
from tightwire.server.ranks.reporter import Reporter
from tightwire.server.ranks.stream_meter import StepSize, StreamMeter


class RankZeroRunner:
    """Implements ``engine.pipeline.StepRunner``."""

    def __init__(
        self,
        runner: ModelRunner,
        groups: RankGroups,
        reporter: Reporter,
        followers: Sequence[zmq.Socket[bytes]],
        *,
        vocab_size: int,
        step_size: StepSize,
        num_replicas: int,
    ) -> None:
        """``followers``: sockets to ranks 1, 2, ...; closed with this object."""
        self._runner, self._group, self._reporter = runner, groups.replica, reporter
        self._followers, self._num_replicas = followers, num_replicas
        self._vocab_size, self._step_size = vocab_size, step_size
        # The group that shares layers has a ledger of its own.
        self._ledgers = [self._group.ledger, *([] if groups.peers is None else [groups.peers.inside.ledger])]
        self._encoder = msgspec.msgpack.Encoder()
        self._warm_up_counts: dict[tuple[str, str, str], Count] = {}
        self.meter: StreamMeter | None = None
        if isinstance(runner.weights, StreamedWeights):
            self.meter = StreamMeter(runner.weights, step_size, self._other_waits_s)

    def close(self) -> None:
        for socket in self._followers:
            socket.close(linger=0)

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        encoded = [self._encoder.encode(plan) for plan in plans] if self._followers else []
        per_replica = (1 + len(self._followers)) // self._num_replicas
        for rank, follower in enumerate(self._followers, start=1):
            follower.send(encoded[rank // per_replica])

    def execute(self, plan: StepPlan, chosen_R: Tensor | None) -> Tensor:
        self._reporter.begin("step", plan.index)
        run = partial(self._runner.execute, plan, chosen_R)
        logits_RV = run() if self.meter is None or not plan.token_ids else self.meter.run(run, plan)
        if logits_RV is None:  # a step that only fills the cache; the caller still waits for its end on the device
            return torch.empty(0, self._vocab_size, device=self._group.device)
        return logits_RV

    def stop_followers(self) -> None:
        """Make the other ranks leave their loops."""
        encoded = self._encoder.encode(StopFollowing())
        for follower in self._followers:
            follower.send(encoded)

    def end_warm_up(self) -> None:
        """Exclude everything so far from the counts."""
        self._warm_up_counts = {count[:3]: count for count in self._all_counts()}
        self._group.ledger.counters.forget_latencies()

    def step_tokens(self) -> int:
        return self._step_size.tokens

    def comm_spent(self) -> Spent:
        return self._group.ledger.spent()

    def counts(self) -> RankCounts:
        return RankCounts(
            comm=self._comm_counts(),
            stream=None if self.meter is None else self.meter.count(),
            kv_offload=self._cache_count(),
        )

    def stream_forecast(self) -> StreamForecast | None:
        """The cost of streaming, after the warm-up; None if nothing streams."""
        return None if self.meter is None else self.meter.forecast()

    def _comm_counts(self) -> list[CommCount]:
        """Totals by collective since the warm-up; for collectives of loading, all of them."""
        counts = [now.since(self._warm_up_counts.get(now[:3])) for now in self._all_counts()]
        return [CommCount(*count) for count in counts if count.calls]

    def _all_counts(self) -> list[Count]:
        return [count for ledger in self._ledgers for count in ledger.counters.counts()]

    def _other_waits_s(self) -> float:
        """Seconds that steps have waited for other replicas' logits and for offloaded keys and values."""
        gather, cache = self._runner.logits_gather, self._cache_count()
        return (0.0 if gather is None else gather.waited_s) + (0.0 if cache is None else cache.waited_s)

    def _cache_count(self) -> CacheCount | None:
        cache = self._runner.cache
        return CacheCount(*cache.flow()) if isinstance(cache, OffloadedCache) else None
