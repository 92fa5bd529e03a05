"""Cells, columns, text and page of ``bench stream``: the step of an arm with a batch, and its bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.bench.report.table import Column, Row
from tightwire.bench.stream.measure import Answered, Event, Timed
from tightwire.bench.stream.options import Arm

_NEAR, _HIDDEN = 0.1, 0.95  # the verdict counts cells this near to the bound, and with this much overlap
_FETCH, _COMPUTE = Column("fetch ms", "fetch_s", ",.1f", 1e3), Column("compute ms", "compute_s", ",.1f", 1e3)
_STEP = Column("step ms", "step_s", ",.1f", 1e3)
ARM_COLUMNS = (Column("weights", "arm"), Column("tp", "tp", "d"))
CELL_COLUMNS = (
    Column("step", "load"),
    _FETCH,
    Column("GB/s", "bytes_per_s", ".3f", 1e-9),
    _COMPUTE,
    _STEP,
    Column("/bound", "over_bound", ".3f"),
    Column("overlap", "overlap", ".1%"),
    Column("x none", "speed_up_over_none", ".2f"),
    Column("tokens/s", "tokens_per_s", ",.1f"),
)
CSV_COLUMNS = (
    *ARM_COLUMNS,
    *(Column(key, key) for key in ("source", "io", "codec", "rate_bytes_per_s", "bytes_per_step", "bound_by")),
    *CELL_COLUMNS,
    Column("same_tokens", "same_tokens"),
)
LEGEND = (
    "Medians of passes, each on its slowest rank. GB/s are of one rank, from source to buffer, decoded. The bound is the longer of "
    "fetch (all streamed layers fetched, nothing computed) and compute (the same step with resident weights), measured in turns "
    "with the step in the same processes. /bound is step / bound. The buffers hold two layers, so where fetch and compute are about equal a step is longer than either. Overlap is (fetch + compute - "
    "step) / min(fetch, compute)."
)


@dataclass(kw_only=True, slots=True)
class Cells:
    """The events of all arms with one number of ranks."""

    tp: int
    answers: dict[Arm, Answered] = field(default_factory=dict)
    turns: list[Timed] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, Answered):
            self.answers[event.arm] = event
        else:
            self.turns.append(event)

    def rows(self, of: Arm | None = None) -> list[dict[str, Any]]:
        """Every cell (``of`` one arm) with all kinds of passes, in the order of the arms."""
        return [
            self._row(arm, batch)
            for arm in self.answers
            if of in (None, arm)
            for batch in sorted({turn.batch for turn in self.turns if turn.arm == arm and turn.batch})
            if all(self._samples(arm, batch).values())
        ]

    def _samples(self, arm: Arm, batch: int) -> dict[str, list[float]]:
        """Seconds of each pass by kind."""
        turns = [turn for turn in self.turns if turn.arm == arm and turn.batch in (None, batch)]
        return {
            kind: [seconds for turn in turns if turn.kind == kind for seconds in turn.seconds]
            for kind in ("fetch", "compute", "step")
        }

    def _row(self, arm: Arm, batch: int) -> dict[str, Any]:
        samples, answer = self._samples(arm, batch), self.answers[arm]
        fetch_s, compute_s, step_s = (median(samples[kind]) for kind in ("fetch", "compute", "step"))
        bound_s = max(fetch_s, compute_s)
        hidden = (fetch_s + compute_s - step_s) / min(fetch_s, compute_s)
        plain = self._samples(Arm(arm.source, "none", arm.rate), batch)["step"]
        return {
            "name": f"{arm.name}, tp {self.tp}, batch {batch}",
            "arm": arm.name.replace(arm.source, f"{arm.source} ({answer.io})", 1) if answer.io else arm.name,
            "load": f"batch {batch}",
            "tp": self.tp,
            "source": arm.source,
            "io": answer.io or None,
            "codec": arm.codec,
            "rate_bytes_per_s": arm.rate or None,
            "rows": batch,
            "bytes_per_step": answer.step_bytes,
            "seconds": describe(samples["step"]),
            "step_s": step_s,
            "fetch_s": fetch_s,
            "compute_s": compute_s,
            "bytes_per_s": answer.step_bytes / fetch_s,
            "bound_s": bound_s,
            "bound_by": "source" if fetch_s > compute_s else "compute",
            "over_bound": step_s / bound_s,
            "overlap": min(1.0, max(0.0, hidden)),
            "speed_up_over_none": median(plain) / step_s if plain else None,
            "tokens_per_s": batch / step_s,
            "same_tokens": answer.same_tokens,
            "samples": samples,
            "batch": neighbour_batch(len(samples["step"])),
        }


def describe_setting(facts: Mapping[str, Any]) -> str:
    layers = f"{facts['stream_layers']} of {facts['num_layers']} layers streamed"
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return (
        f"{facts['model']}, {facts['weights']}, {layers}; {facts['device']}, {threads} a rank; "
        f"{facts['context']} tokens of context"
    )


def verdict(rows: Sequence[Row]) -> str:
    """The number of cells that are near their bound, and that hide the shorter part."""
    near = sum(row["over_bound"] <= 1 + _NEAR for row in rows)
    hidden = sum(row["overlap"] >= _HIDDEN for row in rows)
    return f"{near} of {len(rows)} cells are within {_NEAR:.0%} of the bound; {hidden} hide {_HIDDEN:.0%} or more."
