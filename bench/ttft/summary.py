"""Summarizes turns: a row for each arm in each cell, the wire bound, and which AllReduce to take."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tightwire.bench.report.statistics import Comparison, compare, describe
from tightwire.bench.ttft.measure import Agreement, Measured
from tightwire.bench.ttft.options import GROUPS, TtftOptions, is_policy, policy_path, to_argv
from tightwire.bench.ttft.proof import Cell, WireUse
from tightwire.bench.ttft.requests import Arm, Request, Turn

# In the order in which a request goes through them.
_REST = ("http_s", "tokenize_s", "queue_s", "engine_s", "sampling_s", "send_s")
PARTS = (
    *("http_s", "tokenize_s", "queue_s", "engine_s", "compute_s", "codec_s", "allreduce_s", "sampling_s"),
    "send_s",
)


def rows(measured: Measured) -> list[dict[str, Any]]:
    """Plain data for every cell and arm that has run."""
    return [
        _row(measured, cell, arm)
        for cell in measured.cells
        for arm in measured.arms
        if measured.of(cell, measured.baseline)
    ]


def _samples(measured: Measured, cell: Cell, arm: Arm) -> dict[str, list[float]]:
    """For ``bench compare``: a value for each round, and its ratio to the baseline's, in which the machine's state cancels."""
    found: dict[str, list[float]] = {}
    for name in ("ttft", "tpot"):
        own, base = ([turn.mean(f"{name}_s") for turn in measured.of(cell, each)] for each in (arm, measured.baseline))
        found[f"{name}_s"] = own
        if arm != measured.baseline:
            found[f"{name}_ratio"] = [a / b for a, b in zip(own, base, strict=True) if b]
    return found


def samples(measured: Measured) -> list[dict[str, Any]]:
    """Every timed request; a turn's counters stand beside its first request."""
    return [
        {
            "prompt_len": turn.cell.prompt_len,
            "concurrency": turn.cell.concurrency,
            "arm": turn.arm.name,
            "round": turn.round,
            "place": turn.place,
            "ttft_s": request.ttft_s,
            "tpot_s": request.tpot_s,
            "e2e_s": request.e2e_s,
            "decode_comm_share": request.decode_share,
            "server_ttft_s": request.parts.get("ttft_s"),
            **{part: request.parts.get(part) for part in PARTS},
            "itl_s": request.itl_s,
            "token_ids": request.token_ids,
            "wall_s": turn.wall_s,
            "counts": [count._asdict() for count in turn.counts] if request is turn.requests[0] else None,
        }
        for turn in measured.turns
        for request in turn.requests
    ]


def best_lossless(measured: Measured, cell: Cell) -> Arm | None:
    """The lossless arm with the smallest median, which a lossy arm has to beat; a repeated arm counts once."""
    lossless = [arm for arm in measured.arms if arm.lossless and arm.name == arm.algorithm]
    medians = {arm: statistics.median(turn.mean("ttft_s") for turn in measured.of(cell, arm)) for arm in lossless}
    return min(medians, key=lambda arm: medians[arm], default=None)


def _row(measured: Measured, cell: Cell, arm: Arm) -> dict[str, Any]:
    turns = measured.of(cell, arm)
    requests = [request for turn in turns for request in turn.requests]
    ttft_s = describe([request.ttft_s for request in requests])
    assert ttft_s is not None
    parts = {part: _median_part(requests, part) for part in PARTS}
    best = best_lossless(measured, cell)
    bound = None
    if (use := measured.wire_uses.get((cell, arm.name))) is not None:
        # Without a codec time, coding is inside a fused kernel and not in the bound.
        busy_s = (parts["compute_s"] or 0.0) + (parts["codec_s"] or 0.0)
        bound = describe_bound(
            use, measured.comm["link"], busy_s, ttft_s.p50, overlap=bool(measured.comm.get("overlap"))
        )
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
        "bound": bound,
        "agreement": _agreement([a for a in measured.agreements if (a.cell, a.arm) == (cell, arm)]),
    }


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


def describe_bound(
    use: WireUse, link: Mapping[str, Any], busy_s: float, ttft_s: float, *, overlap: bool
) -> dict[str, float]:
    """The least TTFT on a ``link`` as GET /comm describes it: ``busy_s`` of computing and coding, and the bytes' time.

    With ``overlap`` both happen at once, and the slower of them is the bound.
    """
    rate = link["measured_bytes_per_s"] or link["asked_bytes_per_s"]
    wire_s = (use.wire_bytes / rate if rate else 0.0) + use.rounds * (link["latency_s"] or 0.0)
    bound_s = max(wire_s, busy_s) if overlap else wire_s + busy_s
    return {"wire_bytes": use.wire_bytes, "wire_s": wire_s, "bound_s": bound_s, "ttft_over_bound": ttft_s / bound_s}


# Options of the emulated wire and of the AllReduce, which the recommended command line leaves out.
_LEFT_OUT = ("link", "link_emulation", "allreduce", "allreduce_extra", "comm_policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """``ratio``: in TTFT over all cells, to the arm it is better than; None where there is none."""

    arm: Arm
    command: str
    reason: str
    ratio: Comparison | None = None

    def plain(self) -> dict[str, Any]:
        ratio = None if self.ratio is None else asdict(self.ratio)
        return {"arm": self.arm.name, "command": self.command, "reason": self.reason, "ratio": ratio}


def recommend(measured: Measured, options: TtftOptions) -> list[Recommendation]:
    """The lossless one first, then the lossy one if there is one that is faster; empty before all cells have run."""
    if not all(measured.of(cell, measured.baseline) for cell in measured.cells):
        return []
    # A repeated arm is for comparison with itself.
    arms = [arm for arm in measured.arms if arm.name == arm.algorithm]
    lossless = [arm for arm in arms if arm.lossless]
    if not lossless:
        return []
    exact = _lossless(measured, options, lossless)
    within = [arm for arm in arms if not arm.lossless and _within(arm, options.error_budget)]
    lossy = _lossy(measured, options, exact.arm, within) if within else None
    return [exact] if lossy is None else [exact, lossy]


def excluded(arms: Sequence[Arm], budget: float | None) -> list[Arm]:
    """The lossy arms whose error is above the budget."""
    return [arm for arm in arms if not arm.lossless and not _within(arm, budget)]


def _lossless(measured: Measured, options: TtftOptions, arms: Sequence[Arm]) -> Recommendation:
    simple = measured.baseline if measured.baseline in arms else arms[0]
    best = min(arms, key=lambda arm: statistics.median(_by_round(measured, arm)))
    if best == simple:
        reason = "no lossless one is faster" if len(arms) > 1 else "the only lossless one"
        return Recommendation(arm=simple, command=_command(options, simple), reason=reason)
    ratio = _compare(measured, simple, best)
    if ratio.verdict != "faster":
        reason = f"{best.name} has the least median, but that it is faster is not certain"
        return Recommendation(arm=simple, command=_command(options, simple), reason=reason)
    reason = f"TTFT {_words(ratio)} of {simple.name}'s{_slower_decode(measured, simple, best)}"
    return Recommendation(arm=best, command=_command(options, best), reason=reason, ratio=ratio)


def _lossy(measured: Measured, options: TtftOptions, exact: Arm, arms: Sequence[Arm]) -> Recommendation | None:
    best = min(arms, key=lambda arm: statistics.median(_by_round(measured, arm)))
    ratio = _compare(measured, exact, best)
    if ratio.verdict != "faster":
        return None
    reason = f"TTFT {_words(ratio)} of {exact.name}'s, at a relative RMS error of {best.error:.2g} in each AllReduce"
    reason += _slower_decode(measured, exact, best)
    return Recommendation(arm=best, command=_command(options, best), reason=reason, ratio=ratio)


def _by_round(measured: Measured, arm: Arm) -> list[float]:
    """Each round's geometric mean over the cells, so that long prompts have no more weight than short ones."""
    columns = [[math.log(turn.mean("ttft_s")) for turn in measured.of(cell, arm)] for cell in measured.cells]
    return [math.exp(statistics.fmean(logs)) for logs in zip(*columns, strict=False)]


def _compare(measured: Measured, base: Arm, other: Arm) -> Comparison:
    return compare(_by_round(measured, base), _by_round(measured, other), paired=True, seed=measured.seed)


def _slower_decode(measured: Measured, base: Arm, other: Arm) -> str:
    """A warning if generated tokens take longer."""
    slower = []
    for cell in measured.cells:
        before, after = ([turn.mean("tpot_s") for turn in measured.of(cell, arm)] for arm in (base, other))
        found = compare(before, after, paired=True, seed=measured.seed)
        if found.verdict == "slower":
            slower.append(f"{found.ratio:.2f} at {cell}")
    return f"; but its time per generated token is longer ({', '.join(slower)})" if slower else ""


def _words(ratio: Comparison) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _within(arm: Arm, budget: float | None) -> bool:
    return budget is None or arm.error <= budget


def _command(options: TtftOptions, arm: Arm) -> str:
    own = ["--comm-policy", policy_path(arm.algorithm)] if is_policy(arm.algorithm) else ["--allreduce", arm.algorithm]
    flags = to_argv(options.config, GROUPS, leave_out=("model", *_LEFT_OUT))
    return shlex.join(["tightwire", "serve", options.config.model.model, *flags, *own])
