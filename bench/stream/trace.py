"""How much of the time that weights took to come was hidden behind computing, from what a buffer pool has noted.

    fetch     a layer is being filled                 fill .. filled
    stall     computing waits for a layer             ask .. use
    compute   all of the pass but stalls
    hidden    fetch + compute - pass = fetch - stall

Of two things that take ``fetch`` and ``compute`` at most the shorter can be hidden behind the other: the overlap is
hidden / min(fetch, compute). It is about clocks: that both may slow each other down on shared cores or memory does not show
here but in the pass's length. On CUDA the pool notes when work was queued, which says nothing of when it was done.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tightwire.comm.buffers import SlotEvent


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


def trace_pass(events: Iterable[SlotEvent], begin_s: float, end_s: float) -> PassTrace:
    """``events`` may begin before the pass and end after it; of what reaches beyond, the part inside counts.

    One thread fills and one uses, so each kind of interval ends before the next of its kind begins.
    """
    sums = {"filled": 0.0, "use": 0.0}
    began: dict[str, float] = {}
    for event in events:
        if event.kind in ("fill", "ask"):
            began["filled" if event.kind == "fill" else "use"] = event.at_s
        elif event.kind in sums:
            sums[event.kind] += _inside(began.pop(event.kind), event.at_s, begin_s, end_s)
    return PassTrace(pass_s=end_s - begin_s, fetch_s=sums["filled"], stall_s=sums["use"])


def _inside(start_s: float, stop_s: float, begin_s: float, end_s: float) -> float:
    return max(0.0, min(stop_s, end_s) - max(start_s, begin_s))
