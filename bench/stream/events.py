"""What a rank of ``bench stream`` tells: how long the probe took, what an arm answers, and its passes in blocks."""

from dataclasses import dataclass

from tightwire.bench.stream.cells import Arm, Load
from tightwire.bench.stream.trace import PassTrace

PROBE = Load(False, 512)  # tells how many operations a second the device computes with many rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Seconds of steps with ``PROBE`` and resident weights; before all arms."""

    seconds: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Before an arm is timed: the bytes that each of its steps brings in, and the tokens it answers.

    ``io``: of a prepared folder, ``direct`` where it is read around the page cache, ``dropped`` where that cannot be and the
    cache is dropped before each pass; empty: of other sources.
    """

    arm: Arm
    step_bytes: int
    tokens: list[int]
    resident_tokens: list[int]
    io: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A block of passes of one kind. ``core_s``: what this process used of all cores. ``traces``: of a ``step`` on CPU."""

    arm: Arm
    kind: str  # compute, raw, fetch, step
    load: Load | None  # None: raw passes and fetches have none
    seconds: list[float]
    core_s: list[float]
    traces: list[PassTrace]
    disorder: str | None  # what was out of order in the buffers' trace so far
