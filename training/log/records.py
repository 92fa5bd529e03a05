"""The values that are logged for a step and for an evaluation."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Of the step that made the ``step``-th set of weights. Losses are means over all ranks' tokens."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # of the step, over all ranks
    seconds: float
    mfu: float | None  # share of the device's arithmetic, recomputation not counted; None: peak not known
    memory_bytes: int  # most that a rank has had so far
    wire_bytes: int  # sent by this rank to others in the step
    exposed_ms: float  # of the step, waited for other ranks

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Of the ``step``-th set of weights; ``samples`` are (prompt, continuation)."""

    step: int
    held_out_loss: float
    tokens: int
    samples: tuple[tuple[str, str], ...] = ()

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "samples": [list(sample) for sample in self.samples]}
