"""Defines what ``bench stream`` measures (arms and loads) and what its ranks report (events).

    fetch     a layer is being filled                 fill .. filled
    stall     computing waits for a layer             ask .. use
    compute   the rest of the pass
    hidden    fetch + compute - pass = fetch - stall

At most the shorter of ``fetch`` and ``compute`` can be hidden: overlap = hidden / min(fetch, compute). If both slow each other
down on shared cores, only the length of the pass shows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tightwire.comm.buffers import SlotEvent
from tightwire.model.weights.residency import WeightPlan, spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where layers come from, and the codecs that it has. ``why_no_other`` explains why there is no other codec."""

    origin: str  # of a ``WeightPlan``
    codecs: tuple[str, ...] = ("none", "int8", "int4")
    why_no_other: str = ""
    in_files: bool = False  # works only for a model whose weights are in files
    is_prepared: bool = False  # reads a folder of ``tightwire prepare``, made for the run
    is_shared: bool = False  # replicas keep parts of each layer and make the same steps for their own sequences
    has_raw: bool = True  # its bytes can be read without the pipeline (``raw_source``)


SOURCES = {
    "host": Source(origin="host"),
    "disk": Source(origin="disk", is_prepared=True),
    "peers": Source(origin="files", is_shared=True),
    "files": Source(
        origin="disk",
        codecs=("none",),
        why_no_other="the checkpoint's own files are not encoded",
        in_files=True,
        has_raw=False,  # a pass reads scattered parts and converts them
    ),
}


@dataclass(frozen=True, order=True, slots=True)
class Arm:
    """A source and codec of streamed weights. ``rate``: bytes/s to which each rank's source is throttled; 0: no limit."""

    source: str
    codec: str
    rate: int

    @property
    def name(self) -> str:
        return " ".join([self.source, self.codec, *([f"{self.rate / 1e6:g}MB/s"] if self.rate else [])])

    @property
    def is_shared(self) -> bool:
        return SOURCES[self.source].is_shared

    @property
    def has_raw(self) -> bool:
        """A throttled source is compared with its rate instead."""
        return SOURCES[self.source].has_raw and not self.rate

    def plan(self, num_layers: int, num_streamed: int, num_replicas: int = 1, io: str = "buffered") -> WeightPlan:
        """``num_replicas``: replicas that share layers, if the source is shared. ``io``: how a prepared folder is read."""
        return WeightPlan(
            source="partition" if self.is_shared else "stream",
            origin=SOURCES[self.source].origin,
            ranks_per_node=num_replicas if self.is_shared else 1,
            io=io,
            codec=self.codec,
            streamed=spread(num_layers, num_streamed),
            bytes_per_s=self.rate or None,
        )


@dataclass(frozen=True, order=True, slots=True)
class Load:
    """One kind of step: a token for each of ``rows`` sequences, or one prompt of ``rows`` tokens."""

    is_decode: bool
    rows: int

    @property
    def name(self) -> str:
        return f"batch {self.rows}" if self.is_decode else f"prompt {self.rows}"


PROBE = Load(False, 512)  # measures how fast the device computes many rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTrace:
    """Seconds within one pass."""

    pass_s: float
    fetch_s: float
    stall_s: float

    @property
    def overlap(self) -> float:
        """0 to 1."""
        hideable_s = min(self.fetch_s, self.pass_s - self.stall_s)
        return min(1.0, max(0.0, (self.fetch_s - self.stall_s) / hideable_s)) if hideable_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Seconds of steps with ``PROBE`` and resident weights; reported before all arms."""

    seconds: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Reported before an arm is timed: the bytes that each step fetches, and greedy tokens.

    ``io``: how a prepared folder is read, ``direct`` (around the page cache) or ``dropped`` (the cache is dropped before each
    pass, where direct reads do not work); empty for other sources.
    """

    arm: Arm
    step_bytes: int
    tokens: list[int]
    resident_tokens: list[int]
    io: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A round's passes of one kind. ``core_s``: this process's seconds on all cores. ``traces``: of a ``step`` on CPU."""

    arm: Arm
    kind: str  # compute, raw, fetch, step
    load: Load | None  # None for raw and fetch
    seconds: list[float]
    core_s: list[float]
    traces: list[PassTrace]
    disorder: str | None  # the first wrong order in the buffers' trace so far


Event = Probed | Answered | Timed


def trace_pass(events: Iterable[SlotEvent], begin_s: float, end_s: float) -> PassTrace:
    """Sum fetching and stalls within a pass; ``events`` may begin before it and end after it.

    One thread fills and one uses, so each kind of interval ends before the next of its kind begins. On CUDA the pool notes
    when work was queued, not when it was done, so there is no trace.
    """
    sums = {"filled": 0.0, "use": 0.0}
    began: dict[str, float] = {}
    for event in events:
        if event.kind in ("fill", "ask"):
            began["filled" if event.kind == "fill" else "use"] = event.at_s
        elif event.kind in sums:
            start_s = began.pop(event.kind)
            sums[event.kind] += max(0.0, min(event.at_s, end_s) - max(start_s, begin_s))
    return PassTrace(pass_s=end_s - begin_s, fetch_s=sums["filled"], stall_s=sums["use"])
