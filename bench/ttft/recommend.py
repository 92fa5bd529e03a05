"""Which AllReduce to take, from all cells together: the fastest lossless one, and beside it the fastest lossy one.

Where nothing is certain the simpler one stays: the baseline among the lossless, and lossless before lossy.
"""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tightwire.bench.report.statistics import Comparison, compare
from tightwire.bench.ttft.argv import to_argv
from tightwire.bench.ttft.options import GROUPS, TtftOptions, is_policy, policy_path
from tightwire.bench.ttft.plan import Arm
from tightwire.bench.ttft.summary import Measured, tpot_of, ttft_of

# Of the wire that was emulated, and of what an AllReduce's name stands for.
_NOT_IN_THE_LINE = ("link", "link_emulation", "allreduce", "allreduce_extra", "comm_policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """``ratio``: in TTFT over all cells, to what it is recommended instead of; None where that is itself."""

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
    # One that is there twice is for comparing, not for choosing.
    arms = [arm for arm in measured.arms if arm.name == arm.algorithm]
    lossless = [arm for arm in arms if arm.lossless]
    if not lossless:
        return []
    exact = _lossless(measured, options, lossless)
    within = [arm for arm in arms if not arm.lossless and _within(arm, options.error_budget)]
    lossy = _lossy(measured, options, exact.arm, within) if within else None
    return [exact] if lossy is None else [exact, lossy]


def excluded(arms: Sequence[Arm], budget: float | None) -> list[Arm]:
    """Those that break the budget."""
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
    """Each round's geometric mean over the cells, so that long prompts do not outvote short ones."""
    columns = [[math.log(ttft_of(entry)) for entry in measured.of(cell, arm)] for cell in measured.cells]
    return [math.exp(statistics.fmean(logs)) for logs in zip(*columns, strict=False)]


def _compare(measured: Measured, base: Arm, other: Arm) -> Comparison:
    return compare(_by_round(measured, base), _by_round(measured, other), paired=True, seed=measured.seed)


def _slower_decode(measured: Measured, base: Arm, other: Arm) -> str:
    """A word of warning when a gain in TTFT is paid for later."""
    slower = []
    for cell in measured.cells:
        before, after = ([tpot_of(entry) for entry in measured.of(cell, arm)] for arm in (base, other))
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
    flags = to_argv(options.config, GROUPS, leave_out=("model", *_NOT_IN_THE_LINE))
    return shlex.join(["tightwire", "serve", options.config.model.model, *flags, *own])
