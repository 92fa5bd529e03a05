"""The accuracy that ``auto`` may give up, and what each quantized AllReduce costs. Imports no torch."""

import math
from dataclasses import dataclass

# Mean KL of next-token distributions from exact sums, in nats: SmolLM2-135M, the worst of 2, 4 and 8 ranks
# (docs/quantized-allreduce.md). Larger models lose less, but `tightwire bench quality MODEL` is the way to know.
MEASURED_KL = {
    "flash-int8": 0.0006,
    "flash-int6": 0.0015,
    "flash-int5": 0.0042,
    "flash-int4": 0.018,
    "flash-int3": 0.086,
}
KL_SOURCE = "measured on SmolLM2-135M; `tightwire bench quality MODEL --budget` measures another model"


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """``is_kl``: ``limit`` is a mean KL in nats; else the relative RMS error of one AllReduce."""

    limit: float
    is_kl: bool = False

    def __str__(self) -> str:
        return f"kl={self.limit:g}" if self.is_kl else f"{self.limit:g}"


def parse_error_budget(text: str) -> ErrorBudget:
    """Parse ``0.01`` or ``kl=0.02``; raise ValueError for anything else."""
    is_kl = text.startswith("kl=")
    try:
        limit = float(text.removeprefix("kl="))
    except ValueError:
        limit = math.nan
    if not 0 < limit < (math.inf if is_kl else 1):
        raise ValueError(
            f"must be a relative error above 0 and below 1, or kl=X with a mean KL above 0 in nats, got {text!r}"
        )
    return ErrorBudget(limit, is_kl)
