"""Counters and gauges of the engine. Each field carries the name and help of its metric on /metrics."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Annotated, Literal, NamedTuple, Self, get_type_hints

import msgspec

from tightwire.comm.ledger.ledger import Count


class MetricInfo(NamedTuple):
    """How one field appears on /metrics, as ``tightwire_{name}``."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str


_counter, _gauge = partial(MetricInfo, "counter"), partial(MetricInfo, "gauge")


@cache
def metric_fields(kind: type[msgspec.Struct]) -> dict[str, MetricInfo]:
    """The fields of a struct that are metrics."""
    return {
        name: info
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for info in getattr(hint, "__metadata__", ())
        if isinstance(info, MetricInfo)
    }


class EngineCounters(msgspec.Struct):
    """Totals since start, over all replicas. The engine and its schedulers share one object."""

    num_steps: Annotated[int, _counter("engine_steps", "Forward passes")] = 0
    num_steps_ahead: Annotated[
        int, _counter("engine_steps_planned_ahead", "Forward passes launched before the previous one had finished")
    ] = 0
    num_prompt_tokens: Annotated[int, _counter("prompt_tokens", "Prompt tokens of sequences that began to answer")] = 0
    num_generation_tokens: Annotated[int, _counter("generation_tokens", "Tokens sampled")] = 0
    num_forced_tokens: Annotated[
        int, _counter("forced_tokens", "Tokens that a grammar left no choice about, appended without a forward pass")
    ] = 0
    num_preemptions: Annotated[int, _counter("preemptions", "Sequences preempted because the KV cache was full")] = 0
    num_prefix_queried_tokens: Annotated[
        int, _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
    ] = 0
    num_prefix_hit_tokens: Annotated[
        int, _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache and not computed again")
    ] = 0
    num_drafts: Annotated[int, _counter("drafts", "Guesses of one or more tokens that a step checked")] = 0
    num_draft_tokens: Annotated[int, _counter("draft_tokens", "Tokens guessed ahead")] = 0
    num_accepted_draft_tokens: Annotated[int, _counter("accepted_draft_tokens", "Guessed tokens that were right")] = 0


class ReplicaLoad(msgspec.Struct, frozen=True):
    """One replica at the end of a step."""

    num_running: Annotated[int, _gauge("requests_running", "Sequences in the running batch")]
    num_waiting: Annotated[int, _gauge("requests_waiting", "Sequences waiting to be admitted")]
    num_blocks: int
    num_free_blocks: int


class StreamCount(msgspec.Struct, frozen=True):
    """Transfers of streamed layers to rank 0 since start, including the warm-up."""

    num_bytes: Annotated[int, _counter("weight_stream_bytes", "Bytes of streamed layers received by rank 0")]
    fetch_s: Annotated[
        float, _counter("weight_fetch_seconds", "Time spent transferring streamed layers, mostly during computation")
    ]
    waited_s: Annotated[float, _counter("weight_wait_seconds", "Time that steps waited for a layer")]
    step_tokens: Annotated[int, _gauge("step_tokens_limit", "Most tokens that the next step may take")]


class CacheCount(msgspec.Struct, frozen=True):
    """Transfers between a KV cache on the host and rank 0 since start, including the warm-up."""

    num_bytes: Annotated[int, _counter("kv_offload_bytes", "Bytes of keys and values moved between host and rank 0")]
    waited_s: Annotated[float, _counter("kv_offload_wait_seconds", "Time that steps waited for keys and values")]


class RankCounts(msgspec.Struct, frozen=True):
    """Transfers and collectives since start, as counted by rank 0."""

    comm: list[Count] = []
    stream: StreamCount | None = None  # set if layers stream
    kv_offload: CacheCount | None = None  # set if the KV cache is on the host


class DraftReport(msgspec.Struct, frozen=True):
    """``steps`` checked drafts of ``tokens`` in all, of which ``accepted`` were right; ``tokens_per_sum``: null without sums."""

    steps: int
    tokens: int
    accepted: int
    mean_length: Annotated[float, _gauge("draft_mean_length", "Right tokens of a draft, on average since start")]
    tokens_per_sum: Annotated[
        float | None, _gauge("tokens_per_sum", "Tokens, also first ones, for each sum of decode steps since start")
    ]

    @classmethod
    def of(cls, steps: int, tokens: int, accepted: int, chosen: float, comm: Iterable[Count]) -> Self:
        """``chosen``: tokens of answers, on average those of a replica; ``comm``: what rank 0 counted meanwhile."""
        sums = sum(count.calls for count in comm if (count.op, count.phase) == ("all_reduce", "decode"))
        return cls(steps, tokens, accepted, accepted / max(1, steps), chosen / sums if sums else None)


class EngineStats(RankCounts, frozen=True):
    """The engine at the end of a step. The defaults describe an engine before its first step."""

    loads: list[ReplicaLoad] = []  # one for each replica
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)

    @property
    def total(self) -> ReplicaLoad:
        """The sum over replicas."""
        return ReplicaLoad(*(sum(getattr(load, name) for load in self.loads) for name in ReplicaLoad.__struct_fields__))

    @property
    def drafts(self) -> DraftReport:
        own = self.counters
        drafted = own.num_drafts, own.num_draft_tokens, own.num_accepted_draft_tokens
        return DraftReport.of(*drafted, own.num_generation_tokens / max(1, len(self.loads)), self.comm)
