"""What the ledger adds up of one kind of collective, with the times of the newest calls for the quantiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_RECENT = 512  # calls whose times are kept


@dataclass(slots=True)
class Totals:
    """``recent_s`` is written in turn: entry ``calls % NUM_RECENT``."""

    calls: int = 0
    bytes_sent: int = 0
    exact_bytes: int = 0
    message_bytes: int = 0
    seconds: float = 0.0
    coding_s: float | None = 0.0
    recent_s: list[float] = field(default_factory=lambda: [0.0] * NUM_RECENT)
    first_timed: int = 0  # the call from which on latencies are wanted

    def add_calls(self, seconds: Sequence[float]) -> None:
        """Count calls that took so long each, and their times; their bytes are the caller's to add."""
        newest = seconds[-NUM_RECENT:]
        self.calls += len(seconds)
        self.seconds += sum(seconds)
        at = (self.calls - len(newest)) % NUM_RECENT
        before_end = min(len(newest), NUM_RECENT - at)
        self.recent_s[at : at + before_end] = newest[:before_end]
        self.recent_s[: len(newest) - before_end] = newest[before_end:]

    def quantiles_s(self, *shares: float) -> list[float]:
        """Of the newest calls, for each of ``shares`` a time that so many took less than; empty when there are none."""
        end, num = self.calls, min(self.calls - self.first_timed, NUM_RECENT)
        recent_s = sorted(self.recent_s[call % NUM_RECENT] for call in range(end - num, end))
        return [recent_s[int(num * share)] for share in shares] if num else []
