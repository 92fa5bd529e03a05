"""The accuracy that ``auto`` may give up. Imports no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """A limit on the relative RMS error of one AllReduce or, if ``is_kl``, on the mean KL of next tokens in nats."""

    limit: float
    is_kl: bool = False

    def __str__(self) -> str:
        return f"kl={self.limit:g}" if self.is_kl else f"{self.limit:g}"


def parse_name_or_budget(text: str) -> str | ErrorBudget:
    """Parse the name of an AllReduce, or a budget, which begins with ``kl=`` or a digit."""
    return parse_error_budget(text) if text.startswith("kl=") or text[:1].isdigit() else text


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
