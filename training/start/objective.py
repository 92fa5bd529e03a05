"""Computes what a run minimizes: the next-token loss, or DPO's loss of preferred and rejected answers.

DPO's reference is the model without its adapter, so there is no second model. Source: Rafailov et al., arXiv 2305.18290.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.data.sequences import Batch
from tightwire.training.start.lora import LoraLinear


class Objective(Protocol):
    """The loss of a batch. All ranks make the same forwards."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean over the batch, with a graph for backward."""
        ...

    def weight(self, batch: Batch) -> int:
        """The number of items that ``loss`` is the mean of."""
        ...

    def total(self, model: Any, batch: Batch) -> tuple[float, int]:
        """(sum of the losses, number of items), for an evaluation; items without a target do not count."""
        ...


class NextToken:
    """The mean loss of all targets; ``model.loss_function`` computes it."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        # The targets are shifted already, but transformers computes a loss only if `labels` is given.
        return model(**_inputs(batch), labels=batch.targets_BS, shift_labels=batch.targets_BS).loss

    def weight(self, batch: Batch) -> int:
        return int((batch.targets_BS != IGNORED).sum())

    def total(self, model: Any, batch: Batch) -> tuple[float, int]:
        logits_BSV = model(**_inputs(batch)).logits.float()
        flat = logits_BSV.flatten(0, 1), batch.targets_BS.flatten()
        return float(cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")), self.weight(batch)


@dataclass(frozen=True, slots=True)
class Dpo:
    """The mean over pairs of -log sigmoid(beta * margin), of batches whose sequences are a chosen and a rejected row."""

    beta: float

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return self._losses(model, batch).mean()

    def weight(self, batch: Batch) -> int:
        return len(batch.inputs_BS)

    def total(self, model: Any, batch: Batch) -> tuple[float, int]:
        counted_B = (batch.targets_BS != IGNORED).any(1)
        return float(self._losses(model, batch)[counted_B].sum()), int(counted_B.sum())

    def _losses(self, model: Any, batch: Batch) -> Tensor:
        rows = Batch(*(None if each is None else each.view(2 * len(each), -1) for each in batch))  # pyright: ignore[reportArgumentType]
        with torch.no_grad(), without_adapter(model):
            reference_2B = _answer_logprobs(model, rows)
        chosen_B, rejected_B = (_answer_logprobs(model, rows) - reference_2B).view(-1, 2).unbind(1)
        return -logsigmoid(self.beta * (chosen_B - rejected_B))


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Compute the base model inside ``with``."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


def make_objective(config: TrainConfig) -> Objective:
    return Dpo(config.dpo.beta) if config.data.kind == "preferences" else NextToken()


def _inputs(batch: Batch) -> dict[str, Any]:
    return {"input_ids": batch.inputs_BS, "position_ids": batch.positions_BS, "use_cache": False}


def _answer_logprobs(model: Any, rows: Batch) -> Tensor:
    """(B,) the sum of the log-probabilities of each row's targets."""
    logits_BSV = model(**_inputs(rows)).logits
    own = zip(logits_BSV.unbind(), rows.targets_BS.unbind(), strict=True)
    losses = [
        cross_entropy(row_SV.float(), targets_S, ignore_index=IGNORED, reduction="sum") for row_SV, targets_S in own
    ]
    return -torch.stack(losses)
