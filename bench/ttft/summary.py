"""Rows of ``bench ttft``, one for each arm in each cell, and the recommended command lines."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.report.statistics import Comparison, compare, describe
from tightwire.bench.ttft.measure import Agreement, Measured
from tightwire.bench.ttft.options import GROUPS, TtftOptions, to_argv
from tightwire.bench.ttft.proof import Cell
from tightwire.bench.ttft.requests import Arm, Request, Turn

_REST = ("http_s", "tokenize_s", "queue_s", "engine_s", "sampling_s", "send_s")
_PARTS = (*_REST, "compute_s", "codec_s", "allreduce_s")
# Options of the emulated wire and of the AllReduce, which the recommended command line leaves out.
_LEFT_OUT = ("model", "link", "link_emulation", "allreduce", "allreduce_extra")


def make_rows(measured: Measured) -> list[dict[str, Any]]:
    """Plain data for every cell and arm that has run."""
    return [
        _row(measured, cell, arm)
        for cell in measured.cells
        for arm in measured.arms
        if measured.of(cell, measured.baseline)
    ]


def _row(measured: Measured, cell: Cell, arm: Arm) -> dict[str, Any]:
    turns = measured.of(cell, arm)
    requests = [request for turn in turns for request in turn.requests]
    ttft_s = describe([request.ttft_s for request in requests])
    assert ttft_s is not None
    parts = {part: _median_part(requests, part) for part in _PARTS}
    best = best_lossless(measured, cell)
    return {
        "name": f"{arm.name}, {cell.prompt_len} tokens, {cell.concurrency} at a time",
        "samples": _samples(measured, cell, arm),
        "prompt_len": cell.prompt_len,
        "concurrency": cell.concurrency,
        "arm": arm.name,
        "algorithm": arm.algorithm,
        "lossless": arm.lossless,
        "error": arm.error,
        "rounds": len(turns),
        "ttft_s": asdict(ttft_s),
        "ratio": _ratio(measured, cell, measured.baseline, arm),
        "best_lossless": best.name if best else None,
        "ratio_to_best_lossless": _ratio(measured, cell, best, arm) if best else None,
        "tpot_s": _described([request.tpot_s for request in requests]),
        "tpot_ratio": _ratio(measured, cell, measured.baseline, arm, of="tpot_s"),
        "itl_s": _described([gap for request in requests for gap in request.itl_s]),
        "tokens_per_s": _described([turn.mean("tokens_per_s") for turn in turns]),
        "tokens_per_s_ratio": _ratio(measured, cell, measured.baseline, arm, of="tokens_per_s"),
        "decode_comm_share": statistics.fmean(request.decode_share for request in requests),
        "server_ttft_s": _median_part(requests, "ttft_s"),
        "parts_s": parts,
        "rest_s": sum(parts[part] or 0.0 for part in _REST),
        "allreduce_share": (parts["allreduce_s"] or 0.0) / (_median_part(requests, "ttft_s") or 1.0),
        "sent_bytes": _prefill_bytes(turns),
        "bound": _bound(measured, cell, arm, parts, ttft_s.p50),
        "agreement": _agreement([a for a in measured.agreements if (a.cell, a.arm) == (cell, arm)]),
    }


def _samples(measured: Measured, cell: Cell, arm: Arm) -> dict[str, list[float]]:
    """For ``bench compare``: a value for each round, and its ratio to the baseline's, in which the machine's state cancels."""
    found: dict[str, list[float]] = {}
    for name in ("ttft", "tpot"):
        own, base = ([turn.mean(f"{name}_s") for turn in measured.of(cell, each)] for each in (arm, measured.baseline))
        found[f"{name}_s"] = own
        if arm != measured.baseline:
            found[f"{name}_ratio"] = [a / b for a, b in zip(own, base, strict=True) if b]
    return found


def request_samples(measured: Measured) -> list[dict[str, Any]]:
    """Every timed request; a turn's counters are with its first request."""
    return [
        {
            **asdict(turn.cell),
            "arm": turn.arm.name,
            "round": turn.round,
            "place": turn.place,
            **{name: getattr(request, name) for name in ("ttft_s", "tpot_s", "e2e_s", "itl_s", "token_ids")},
            "decode_comm_share": request.decode_share,
            "server_ttft_s": request.parts.get("ttft_s"),
            **{part: request.parts.get(part) for part in _PARTS},
            "wall_s": turn.wall_s,
            "counts": [count._asdict() for count in turn.counts] if request is turn.requests[0] else None,
        }
        for turn in measured.turns
        for request in turn.requests
    ]


def best_lossless(measured: Measured, cell: Cell) -> Arm | None:
    """The lossless arm with the smallest median TTFT; a repeated arm counts once."""
    lossless = [arm for arm in measured.arms if arm.lossless and arm.name == arm.algorithm]
    medians = {arm: statistics.median(turn.mean("ttft_s") for turn in measured.of(cell, arm)) for arm in lossless}
    return min(medians, key=lambda arm: medians[arm], default=None)


def _ratio(measured: Measured, cell: Cell, baseline: Arm, arm: Arm, of: str = "ttft_s") -> dict[str, Any] | None:
    """The ratio of ``arm`` to ``baseline``, paired by round; None for the baseline itself."""
    if arm == baseline:
        return None
    base, own = ([turn.mean(of) for turn in measured.of(cell, each)] for each in (baseline, arm))
    return asdict(compare(base, own, paired=True, seed=measured.seed, worse_is_higher=of != "tokens_per_s"))


def _described(values: Sequence[float]) -> dict[str, Any] | None:
    distribution = describe(values)
    return None if distribution is None else asdict(distribution)


def _median_part(requests: Sequence[Request], part: str) -> float | None:
    """None where the server does not measure it."""
    values = [value for request in requests if (value := request.parts.get(part)) is not None]
    return statistics.median(values) if values else None


def _prefill_bytes(turns: Sequence[Turn]) -> float:
    """Bytes that rank 0 sent for one prompt, on average."""
    sent = sum(count.bytes_sent for turn in turns for count in turn.counts if count.phase == "prefill")
    return sent / sum(len(turn.requests) for turn in turns)


def _bound(
    measured: Measured, cell: Cell, arm: Arm, parts: Mapping[str, float | None], ttft_s: float
) -> dict[str, float] | None:
    if (use := measured.wire_uses.get((cell, arm.name))) is None:
        return None
    # Without a codec time, coding is inside a fused kernel and not in the bound.
    busy_s = (parts["compute_s"] or 0.0) + (parts["codec_s"] or 0.0)
    return use.bound(measured.comm["link"], busy_s, ttft_s, overlap=bool(measured.comm.get("overlap")))


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


def recommend(measured: Measured, options: TtftOptions) -> list[dict[str, Any]]:
    """The fastest lossless arm, then the lossy one if it is certainly faster; empty before all cells have run.

    A lossless arm replaces the baseline only if it is certainly faster.
    """
    arms = [arm for arm in measured.arms if arm.name == arm.algorithm]  # a repeated arm shows only the noise
    lossless = [arm for arm in arms if arm.lossless]
    if not lossless or not all(measured.of(cell, measured.baseline) for cell in measured.cells):
        return []
    simple = measured.baseline if measured.baseline in lossless else lossless[0]
    exact, ratio = _fastest(measured, simple, lossless)
    reason = "no other lossless AllReduce is certainly faster"
    if ratio is not None:
        reason = f"TTFT {_words(ratio)} of {simple.name}'s{_slower_decode(measured, simple, exact)}"
    found = [_recommendation(options, exact, reason, ratio)]
    lossy, ratio = _fastest(measured, exact, [arm for arm in arms if not arm.lossless])
    if ratio is not None:
        reason = f"TTFT {_words(ratio)} of {exact.name}'s, relative RMS error {lossy.error:.2g} in each AllReduce"
        found.append(_recommendation(options, lossy, reason + _slower_decode(measured, exact, lossy), ratio))
    return found


def _recommendation(options: TtftOptions, arm: Arm, reason: str, ratio: Comparison | None) -> dict[str, Any]:
    flag = ["--allreduce", arm.algorithm]
    flags = to_argv(options.config, GROUPS, leave_out=_LEFT_OUT)
    command = shlex.join(["tightwire", "serve", options.config.model.model, *flags, *flag])
    return {"arm": arm.name, "command": command, "reason": reason, "ratio": None if ratio is None else asdict(ratio)}


def _fastest(measured: Measured, base: Arm, arms: Sequence[Arm]) -> tuple[Arm, Comparison | None]:
    """The fastest of ``arms`` and its ratio to ``base``; ``base`` and None if that one is not certainly faster."""
    best = min(arms, key=lambda arm: statistics.median(_by_round(measured, arm)), default=base)
    if best == base:
        return base, None
    ratio = compare(_by_round(measured, base), _by_round(measured, best), paired=True, seed=measured.seed)
    return (best, ratio) if ratio.verdict == "faster" else (base, None)


def _words(ratio: Comparison) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _by_round(measured: Measured, arm: Arm) -> list[float]:
    """Each round's geometric mean over the cells, so that long prompts have no more weight than short ones."""
    columns = [[math.log(turn.mean("ttft_s")) for turn in measured.of(cell, arm)] for cell in measured.cells]
    return [math.exp(statistics.fmean(logs)) for logs in zip(*columns, strict=False)]


def _slower_decode(measured: Measured, base: Arm, other: Arm) -> str:
    """A warning if the time per generated token is longer."""
    slower = []
    for cell in measured.cells:
        found = _ratio(measured, cell, base, other, of="tpot_s")
        if found is not None and found["verdict"] == "slower":
            slower.append(f"{found['ratio']:.2f} at {cell}")
    return f"; but its time per generated token is longer ({', '.join(slower)})" if slower else ""
