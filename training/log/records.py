"""The values that are logged for a step and for an evaluation."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step; ``step`` counts from 1. ``loss`` is the mean over all ranks' tokens."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # in this step, over all ranks
    seconds: float
    mfu: float | None  # model FLOPs utilization, without recomputation; None: the peak is not known
    memory_bytes: int  # highest peak of any rank so far
    wire_bytes: int  # sent by this rank in this step
    exposed_ms: float  # time that this rank waited for communication in this step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """One evaluation of the weights after ``step`` steps. ``samples`` holds (prompt, continuation) pairs."""

    step: int
    held_out_loss: float
    tokens: int
    samples: tuple[tuple[str, str], ...] = ()

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "samples": [list(sample) for sample in self.samples]}
