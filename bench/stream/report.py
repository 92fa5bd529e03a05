"""Cells, columns, text and page of ``bench stream``: the step of an arm with a batch, and its bound."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tightwire.bench.report.page import Item, Text, bars, lines
from tightwire.bench.report.statistics import describe
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.stream.measure import Answered, Event, Timed
from tightwire.bench.stream.options import Arm

_NEAR, _HIDDEN = 0.1, 0.95  # the verdict counts cells this near to the bound, and with this much overlap
_FETCH, _COMPUTE = Column("fetch ms", "fetch_s", ",.1f", 1e3), Column("compute ms", "compute_s", ",.1f", 1e3)
_STEP = Column("step ms", "step_s", ",.1f", 1e3)
_ARM_COLUMNS = (Column("weights", "arm"), Column("tp", "tp", "d"))
_CELL_COLUMNS = (
    Column("step", "load"),
    _FETCH,
    Column("GB/s", "bytes_per_s", ".3f", 1e-9),
    _COMPUTE,
    _STEP,
    Column("/bound", "over_bound", ".3f"),
    Column("/wire", "over_wire_bound", ".3f"),
    Column("overlap", "overlap", ".1%"),
    Column("x none", "speed_up_over_none", ".2f"),
    Column("tokens/s", "tokens_per_s", ",.1f"),
)
CSV_COLUMNS = (
    *_ARM_COLUMNS,
    *(Column(key, key) for key in ("dp", "source", "io", "codec", "rate_bytes_per_s", "bytes_per_step", "bound_by")),
    *_CELL_COLUMNS,
    Column("same_tokens", "same_tokens"),
)
_LEGEND = (
    "Medians of passes, each on its slowest rank. GB/s are of one rank, from source to buffer, decoded. The bound is the longer of "
    "fetch (all streamed layers fetched, nothing computed) and compute (the same step with resident weights), measured in turns "
    "with the step in the same processes. /bound is step / bound; /wire, with --rates, uses bytes / rate for fetch. The buffers "
    "hold two layers, so where fetch and compute are about equal a step is longer than either. Overlap is (fetch + compute - "
    "step) / min(fetch, compute), from the buffers' trace of each step on the rank with the least; there is no trace on CUDA."
)


@dataclass(kw_only=True, slots=True)
class Cells:
    """The events of all arms with one number of ranks, by rank."""

    tp: int
    world_size: int  # above tp for replicas that run the same steps
    answers: dict[Arm, dict[int, Answered]] = field(default_factory=dict)
    blocks: dict[tuple[Arm, str, int | None], dict[int, list[Timed]]] = field(default_factory=dict)

    def add(self, rank: int, event: Event) -> None:
        if isinstance(event, Answered):
            self.answers.setdefault(event.arm, {})[rank] = event
        else:
            self.blocks.setdefault((event.arm, event.kind, event.batch), {}).setdefault(rank, []).append(event)

    def rows(self, of: Arm | None = None) -> list[dict[str, Any]]:
        """Every cell (``of`` one arm) with all kinds of passes, in the order of the arms."""
        return [
            self._row(arm, batch)
            for arm in self.answers
            if of in (None, arm)
            for batch in sorted({batch for own, _, batch in self.blocks if own == arm and batch})
            if all(self._seconds(arm, kind, each) for kind, each in _kinds(batch).items())
        ]

    def _row(self, arm: Arm, batch: int) -> dict[str, Any]:
        samples = {kind: self._seconds(arm, kind, of) for kind, of in _kinds(batch).items()}
        fetch_s, compute_s, step_s = (median(samples[kind]) for kind in ("fetch", "compute", "step"))
        answer, step_bytes = self.answers[arm][0], [answer.step_bytes for answer in self.answers[arm].values()]
        wire_s = max(step_bytes) / arm.rate if arm.rate else None
        bound_s = max(fetch_s, compute_s)
        overlaps = [min(trace.overlap for trace in traces) for traces in self._by_pass(arm, "step", batch, "traces")]
        plain = self._seconds(Arm(arm.source, "none", arm.rate), "step", batch)
        return {
            "name": f"{arm.name}, tp {self.tp}, batch {batch}",
            "arm": arm.name.replace(arm.source, f"{arm.source} ({answer.io})", 1) if answer.io else arm.name,
            "load": f"batch {batch}",
            "tp": self.tp,
            "dp": self.world_size // self.tp,
            "source": arm.source,
            "io": answer.io or None,
            "codec": arm.codec,
            "rate_bytes_per_s": arm.rate or None,
            "rows": batch,
            "bytes_per_step": max(step_bytes),  # of the rank that fetches most
            "bytes_per_step_all_ranks": sum(step_bytes),
            "seconds": asdict(describe(samples["step"])),  # pyright: ignore[reportArgumentType]
            "step_s": step_s,
            "fetch_s": fetch_s,
            "compute_s": compute_s,
            "bytes_per_s": max(step_bytes) / fetch_s,
            "bound_s": bound_s,
            "bound_by": "source" if fetch_s > compute_s else "compute",
            "over_bound": step_s / bound_s,
            "wire_s": wire_s,
            "over_wire_bound": None if wire_s is None else step_s / max(wire_s, compute_s),
            "overlap": median(overlaps) if overlaps else None,
            "speed_up_over_none": median(plain) / step_s if plain else None,
            "tokens_per_s": batch / step_s,
            "same_tokens": min(map(_share_of_same, self.answers[arm].values())),
            "faults": self._faults(arm),
            "samples": samples,
        }

    def _seconds(self, arm: Arm, kind: str, batch: int | None) -> list[float]:
        """Each pass on the slowest rank, of the passes that all ranks reported."""
        return [max(passes) for passes in self._by_pass(arm, kind, batch, "seconds")]

    def _by_pass(self, arm: Arm, kind: str, batch: int | None, what: str) -> list[tuple[Any, ...]]:
        """The values of every rank, pass by pass; [] until all ranks reported."""
        ranks = self.blocks.get((arm, kind, batch), {})
        if len(ranks) < self.world_size:
            return []
        by_rank = ([value for block in blocks for value in getattr(block, what)] for blocks in ranks.values())
        return list(zip(*by_rank, strict=False))

    def _faults(self, arm: Arm) -> list[str]:
        """Wrong answers and wrong buffer orders, which invalidate the arm."""
        found = [
            f"rank {rank} generates {answer.tokens}, but with resident weights {answer.resident_tokens}"
            for rank, answer in self.answers[arm].items()
            if arm.codec == "none" and answer.tokens != answer.resident_tokens
        ]
        for (of, _, _), ranks in self.blocks.items():
            found += [
                f"rank {rank}: {block.disorder}"
                for rank, blocks in ranks.items()
                for block in blocks
                if of == arm and block.disorder
            ]
        return list(dict.fromkeys(found))


def _kinds(batch: int) -> dict[str, int | None]:
    return {"fetch": None, "compute": batch, "step": batch}


def _share_of_same(answer: Answered) -> float:
    """The share of greedy tokens before the first that differs from resident weights'."""
    pairs = list(zip(answer.tokens, answer.resident_tokens, strict=True))
    return next((place for place, (own, resident) in enumerate(pairs) if own != resident), len(pairs)) / len(pairs)


def fault_texts(rows: Iterable[Row]) -> list[str]:
    """Every fault once, with its arm."""
    found = (f"{row['source']} {row['codec']} at tp {row['tp']}: {fault}" for row in rows for fault in row["faults"])
    return list(dict.fromkeys(found))


def arm_table(rows: Sequence[Row]) -> Table:
    """The cells of one arm."""
    title = f"{rows[0]['arm']}, tp {rows[0]['tp']}"
    return Table(columns=_CELL_COLUMNS, rows=rows, title=title, wrong=lambda row: bool(row["faults"]))


def describe_setting(facts: Mapping[str, Any]) -> str:
    """Model, weights and layers in one line."""
    layers = f"{facts['stream_layers']} of {facts['num_layers']} layers streamed"
    replicas = f"; peers: {facts['dp']} replicas" if facts["dp"] > 1 else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return (
        f"{facts['model']}, {facts['weights']}, {layers}; {facts['device']}, {threads} a rank; "
        f"{facts['context']} tokens of context{replicas}"
    )


def verdict(rows: Sequence[Row]) -> str:
    """The number of cells that are near their bound, and that hide the shorter part."""
    near = sum(row["over_bound"] <= 1 + _NEAR for row in rows)
    traced = [row["overlap"] for row in rows if row["overlap"] is not None]
    hidden = f"; {sum(overlap >= _HIDDEN for overlap in traced)} hide {_HIDDEN:.0%} or more" if traced else ""
    return f"{near} of {len(rows)} cells are within {_NEAR:.0%} of the bound{hidden}."


def make_sections(rows: Sequence[dict[str, Any]]) -> list[Item]:
    first = [{**row, "bar": f"{row['arm']}, tp {row['tp']}"} for row in rows if row["load"] == rows[0]["load"]]
    bound, step = Column("bound, ms", "bound_s", ",.1f", 1e3), Column("step / bound", "over_bound", ".3f")
    items: list[Item] = [
        Text(title="Findings", lines=[verdict(rows)]),
        lines(
            "Step over its bound",
            rows,
            by="codec",
            x=bound,
            y=step,
            log_y=False,
            joined=False,
            level=1.0,
            from_zero=False,
        ),
        bars(
            f"Fetch and compute one after the other, {first[0]['load']}",
            first,
            label=Column("weights", "bar"),
            parts=(_FETCH, _COMPUTE),
            x_label="ms",
            note="The longer one is the bound.",
        ),
    ]
    throttled = [
        {**row, "line": f"{row['source']} {row['codec']}, tp {row['tp']}"} for row in first if row["rate_bytes_per_s"]
    ]
    if len({row["rate_bytes_per_s"] for row in throttled}) > 1:
        rate = Column("rate of the source, MB/s", "rate_bytes_per_s", ",.0f", 1e-6)
        items.append(lines(f"Step by rate, {first[0]['load']}", throttled, by="line", x=rate, y=_STEP, ticks=True))
    cells = Table(
        title="All cells",
        columns=[*_ARM_COLUMNS, *_CELL_COLUMNS],
        rows=rows,
        note=_LEGEND,
        wrong=lambda row: bool(row["faults"]),
    )
    return [*items, cells]
