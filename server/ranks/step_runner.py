"""Runs the engine's steps on all ranks from rank 0. Sends plans first, so that ranks enter collectives together."""

import time
from collections.abc import Sequence

import msgspec
import torch
import zmq
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.comm.ledger.ledger import Count, Spent
from tightwire.model.build import RankGroups
from tightwire.model.cache.kv_cache import OffloadedCache
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.ipc.engine_stats import CacheCount, RankCounts, StreamCount
from tightwire.server.ipc.messages import Banned, LoadSlot, StopFollowing
from tightwire.server.ranks.reporter import Reporter

_FULL = 0.9  # share of the step limit; a smaller step says nothing about larger ones
_WAITING = 0.1  # share of the step's time
_LINGER_MS = 500  # for the last message to a rank on another host


class StepSize:
    """A step's token limit when layers stream: doubles from ``least`` to ``most`` while full steps wait for layers."""

    def __init__(self, least: int, most: int) -> None:
        self.tokens, self._most = least, most

    def learn(self, num_tokens: int, step_s: float, waited_s: float) -> None:
        """Update the limit from one step: its tokens, its time, and the part of it spent waiting for layers."""
        if num_tokens >= _FULL * self.tokens and waited_s > _WAITING * step_s:
            self.tokens = min(2 * self.tokens, self._most)


class RankZeroRunner:
    """Implements ``engine.pipeline.StepRunner``."""

    def __init__(
        self,
        runner: ModelRunner,
        groups: RankGroups,
        reporter: Reporter,
        followers: Sequence[zmq.Socket[bytes]],
        *,
        step_size: StepSize,
        num_replicas: int,
    ) -> None:
        """``followers``: sockets to ranks 1, 2, ...; closed with this object."""
        self._runner, self._group, self._reporter = runner, groups.replica, reporter
        self._followers, self._ranks_each = followers, (1 + len(followers)) // num_replicas
        self._step_size = step_size
        # The groups that share layers, and that pass prompts from stage to stage, have ledgers of their own.
        self._stages = [group.ledger for group in (groups.stages, groups.beside) if group is not None]
        inside = [] if groups.peers is None else [groups.peers.inside.ledger]
        self._ledgers = [self._group.ledger, *self._stages, *inside]
        self._encoder = msgspec.msgpack.Encoder()
        self._warm_up_counts: dict[tuple[str, str, str], Count] = {}
        self._streamed = runner.weights if isinstance(runner.weights, StreamedWeights) else None

    def close(self) -> None:
        for socket in self._followers:
            socket.close(linger=_LINGER_MS)

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        encoded = [self._encoder.encode(plan) for plan in plans] if self._followers else []
        for rank, follower in enumerate(self._followers, start=1):
            follower.send(encoded[rank // self._ranks_each])

    def execute(self, plan: StepPlan, chosen_R: Tensor | None) -> Tensor:
        self._reporter.begin("step", plan.index)
        before_s, start_s = 0.0 if self._streamed is None else self._streamed.flow().waited_s, time.perf_counter()
        logits_RV = self._runner.execute(plan, chosen_R)
        if self._stages and plan.phase == "prefill" and self._group.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the engine learns how long a chunk takes
        if self._streamed is not None and plan.token_ids:
            waited_s = self._streamed.flow().waited_s - before_s
            self._step_size.learn(plan.num_rows, time.perf_counter() - start_s, waited_s)
        if logits_RV is None:  # a step that only fills the cache; the caller still waits for its end on the device
            return torch.empty(0, device=self._group.device)
        return logits_RV

    def choose(self, plans: Sequence[StepPlan], logits_RV: Tensor | None, banned: Sequence[bytes]) -> Tensor | Pending:
        for rank, follower in enumerate(self._followers, start=1):
            if bits := banned[rank // self._ranks_each]:
                follower.send(self._encoder.encode(Banned(bits)))
        results = self._runner.choose(plans[0], logits_RV, banned[0])
        assert results is not None, "the engine runs on rank 0, which gets all tokens"
        return results

    def tell_followers(self, message: LoadSlot | StopFollowing) -> None:
        """Send one message to all other ranks, after the plans so far."""
        encoded = self._encoder.encode(message)
        for follower in self._followers:
            follower.send(encoded)

    def end_warm_up(self) -> None:
        """Exclude everything so far from the counts."""
        self._warm_up_counts = {count[:3]: count for count in self._all_counts()}
        for ledger in self._ledgers:
            ledger.counters.forget_latencies()

    def step_tokens(self) -> int:
        return self._step_size.tokens

    def comm_spent(self) -> Spent:
        spent = self._group.ledger.spent()
        return spent._replace(seconds=spent.seconds + sum(ledger.waited_s for ledger in self._stages))

    def counts(self) -> RankCounts:
        flow, cache = None if self._streamed is None else self._streamed.flow(), self._runner.cache
        comm = [now.since(self._warm_up_counts.get(now[:3])) for now in self._all_counts()]
        return RankCounts(
            comm=[count for count in comm if count.calls],
            stream=flow and StreamCount(flow.num_bytes, flow.fetch_s, flow.waited_s, self._step_size.tokens),
            kv_offload=CacheCount(*cache.flow()) if isinstance(cache, OffloadedCache) else None,
        )

    def _all_counts(self) -> list[Count]:
        return [count for ledger in self._ledgers for count in ledger.counters.counts()]
