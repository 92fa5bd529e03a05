"""From entries to rows: one arm in one cell, its times, its ratio to others, where its time goes, how exact it is."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tightwire.bench.report.statistics import compare, describe
from tightwire.bench.ttft.answers import Agreement
from tightwire.bench.ttft.bound import WireUse, describe_bound
from tightwire.bench.ttft.meter import Entry, Request
from tightwire.bench.ttft.plan import Arm, Cell

# In the order in which a request goes through them.
PARTS = (
    *("http_s", "tokenize_s", "queue_s", "engine_s", "compute_s", "codec_s", "allreduce_s", "sampling_s"),
    "send_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All that a run has brought so far. Blocks are whole: every arm has run in each."""

    cells: Sequence[Cell]
    arms: Sequence[Arm]
    baseline: Arm
    entries: Sequence[Entry]
    agreements: Sequence[Agreement]
    link: Mapping[str, Any] | None = None  # as GET /comm describes it
    overlap: bool = False
    uses: Mapping[tuple[Cell, str], WireUse] = field(default_factory=dict)  # by cell and arm, where there is a link
    seed: int = 0

    def of(self, cell: Cell, arm: Arm) -> list[Entry]:
        """In order of the rounds, so that lists of two arms of a cell are paired."""
        own = (entry for entry in self.entries if entry.cell == cell and entry.arm == arm)
        return sorted(own, key=lambda entry: entry.round)


def whole_blocks(entries: Sequence[Entry], num_arms: int) -> list[Entry]:
    """Without the entries of a block that was cut short."""
    sizes: dict[tuple[int, Cell], int] = {}
    for entry in entries:
        sizes[entry.round, entry.cell] = sizes.get((entry.round, entry.cell), 0) + 1
    return [entry for entry in entries if sizes[entry.round, entry.cell] == num_arms]


def ttft_of(entry: Entry) -> float:
    """An entry's one value: the mean over its requests."""
    return statistics.fmean(request.ttft_s for request in entry.requests)


def tpot_of(entry: Entry) -> float:
    return statistics.fmean(request.tpot_s for request in entry.requests)


def rows(measured: Measured) -> list[dict[str, Any]]:
    """Plain data for every cell and arm that has run."""
    return [
        _row(measured, cell, arm)
        for cell in measured.cells
        for arm in measured.arms
        if measured.of(cell, measured.baseline)
    ]


def best_lossless(measured: Measured, cell: Cell) -> Arm | None:
    """What a lossy arm has to beat: the lossless arm with the least median; one that is there twice counts once."""
    lossless = [arm for arm in measured.arms if arm.lossless and arm.name == arm.algorithm]
    medians = {arm: statistics.median(map(ttft_of, measured.of(cell, arm))) for arm in lossless}
    return min(medians, key=lambda arm: medians[arm], default=None)


def _row(measured: Measured, cell: Cell, arm: Arm) -> dict[str, Any]:
    entries = measured.of(cell, arm)
    requests = [request for entry in entries for request in entry.requests]
    ttft_s = describe([request.ttft_s for request in requests])
    assert ttft_s is not None
    parts = {part: _median_part(requests, part) for part in PARTS}
    best = best_lossless(measured, cell)
    bound = None
    if measured.link is not None and (use := measured.uses.get((cell, arm.name))) is not None:
        compute_s = parts["compute_s"] or 0.0
        bound = describe_bound(
            use,
            measured.link,
            compute_s=compute_s,
            codec_s=parts["codec_s"],
            ttft_s=ttft_s.p50,
            overlap=measured.overlap,
        )
    return {
        "prompt_len": cell.prompt_len,
        "concurrency": cell.concurrency,
        "arm": arm.name,
        "algorithm": arm.algorithm,
        "lossless": arm.lossless,
        "error": arm.error,
        "blocks": len(entries),
        "ttft_s": asdict(ttft_s),
        "ratio": _ratio(measured, cell, measured.baseline, arm),
        "best_lossless": best.name if best else None,
        "ratio_to_best_lossless": _ratio(measured, cell, best, arm) if best else None,
        "tpot_s": _described([request.tpot_s for request in requests]),
        "tpot_ratio": _ratio(measured, cell, measured.baseline, arm, of="tpot"),
        "itl_s": _described([gap for request in requests for gap in request.itl_s]),
        "tokens_per_s": _described([entry.tokens_per_s for entry in entries]),
        "tokens_per_s_ratio": _ratio(measured, cell, measured.baseline, arm, of="tokens"),
        "decode_comm_share": statistics.fmean(request.decode_share for request in requests),
        "server_ttft_s": _median_part(requests, "ttft_s"),
        "parts_s": parts,
        "allreduce_share": (parts["allreduce_s"] or 0.0) / (_median_part(requests, "ttft_s") or 1.0),
        "sent_bytes": _prefill_bytes(entries),
        "bound": bound,
        "agreement": _agreement([a for a in measured.agreements if (a.cell, a.arm) == (cell, arm)]),
    }


_VALUES = {"ttft": ttft_of, "tpot": tpot_of, "tokens": lambda entry: entry.tokens_per_s}


def _ratio(measured: Measured, cell: Cell, baseline: Arm, arm: Arm, of: str = "ttft") -> dict[str, Any] | None:
    """How ``arm`` relates to ``baseline``, block by block; None for the baseline itself."""
    if arm == baseline:
        return None
    value = _VALUES[of]
    base, own = ([value(entry) for entry in measured.of(cell, each)] for each in (baseline, arm))
    return asdict(compare(base, own, paired=True, seed=measured.seed, worse_is_higher=of != "tokens"))


def _described(values: Sequence[float]) -> dict[str, Any] | None:
    distribution = describe(values)
    return None if distribution is None else asdict(distribution)


def _median_part(requests: Sequence[Request], part: str) -> float | None:
    """None where the server does not know it."""
    values = [value for request in requests if (value := request.parts.get(part)) is not None]
    return statistics.median(values) if values else None


def _prefill_bytes(entries: Sequence[Entry]) -> float:
    """What rank 0 sent for one prompt, on average."""
    sent = sum(count.bytes_sent for entry in entries for count in entry.counts if count.phase == "prefill")
    return sent / sum(len(entry.requests) for entry in entries)


def _agreement(checked: Sequence[Agreement]) -> dict[str, Any] | None:
    if not checked:
        return None
    gaps = [a.gap for a in checked if a.gap is not None]
    return {
        "checked": len(checked),
        "same": len(checked) - len(gaps),
        "first_difference": min((a.matched for a in checked if a.gap is not None), default=None),
        "largest_gap_nats": max(gaps, default=None),
    }
