"""Computes what a run minimizes: the next-token loss, or the loss of DPO or a reward model, of preferred and rejected answers.

DPO's reference is the model without its adapter, so there is no second model. Source: Rafailov et al., arXiv 2305.18290.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.data.sequences import Batch
from tightwire.training.start.answers import Grpo, Ppo
from tightwire.training.start.distill import Distill
from tightwire.training.start.lora import computing
from tightwire.training.start.loss import MeanOfTargets


class Objective(Protocol):
    """The loss of a batch. All ranks make the same forwards. ``figures``: names of what is reported beside the loss."""

    @property
    def figures(self) -> tuple[str, ...]: ...

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean over the batch, with a graph for backward, and (F,) sums of the figures over the batch."""
        ...

    def weight(self, batch: Any) -> int:
        """The number of items that ``loss`` is the mean of."""
        ...

    def total(self, model: Any, batch: Any) -> list[float]:
        """[number of items, sum of the losses, sums of the figures], for an evaluation; items without a target do not count."""
        ...


class NextToken(MeanOfTargets):
    """The mean loss of all targets; ``model.loss_function`` computes it."""

    figures: tuple[str, ...] = ()

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        # The targets are shifted already, but transformers computes a loss only if `labels` is given.
        loss = model(**_inputs(batch), labels=batch.targets_BS, shift_labels=batch.targets_BS).loss
        return loss, loss.new_empty(0)

    def total(self, model: Any, batch: Batch) -> list[float]:
        logits_BSV = model(**_inputs(batch)).logits.float()
        flat = logits_BSV.flatten(0, 1), batch.targets_BS.flatten()
        return [self.weight(batch), float(cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"))]


class Pairs(ABC):
    """The mean over pairs of -log sigmoid(margin), of batches whose sequences are a chosen and a rejected row."""

    figures: tuple[str, ...] = ("accuracy", "margin")

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        losses_B, figures_BF = self._losses(model, batch)
        return losses_B.mean(), figures_BF.sum(0)

    def weight(self, batch: Batch) -> int:
        return len(batch.inputs_BS)

    def total(self, model: Any, batch: Batch) -> list[float]:
        counted_B = (batch.targets_BS != IGNORED).any(1)
        losses_B, figures_BF = self._losses(model, batch)
        return [int(counted_B.sum()), float(losses_B[counted_B].sum()), *figures_BF[counted_B].sum(0).tolist()]

    def _losses(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B,) losses and (B, F) figures."""
        rows = Batch(*(None if each is None else each.view(2 * len(each), -1) for each in batch))  # pyright: ignore[reportArgumentType]
        chosen_B, rejected_B = self._rewards(model, rows).view(-1, 2).unbind(1)
        margin_B = chosen_B - rejected_B
        return -logsigmoid(margin_B), torch.stack([(margin_B > 0).float(), margin_B], 1).detach()

    @abstractmethod
    def _rewards(self, model: Any, rows: Batch) -> Tensor:
        """(2B,) the reward of each row."""


@dataclass(frozen=True, slots=True)
class Dpo(Pairs):
    """A row's reward is ``beta`` times how much likelier its answer is than in the reference."""

    beta: float

    def _rewards(self, model: Any, rows: Batch) -> Tensor:
        with torch.no_grad(), computing(model, "base"):
            reference_2B = _answer_logprobs(model, rows)
        return self.beta * (_answer_logprobs(model, rows) - reference_2B)


class Reward(Pairs):
    """A row's reward is what the head of a reward model says at its target. Source: Ouyang et al., arXiv 2203.02155."""

    def _rewards(self, model: Any, rows: Batch) -> Tensor:
        return rewards_of(model, rows)


def rewards_of(model: Any, rows: Batch) -> Tensor:
    """(B,) the rewards of a model with such a head. A row without a target has 0."""
    # Without the model's own scaling and caps of logits, which are for tokens.
    scores_BS = model.lm_head(model.model(**_inputs(rows)).last_hidden_state)[..., 0].float()
    return (scores_BS * (rows.targets_BS != IGNORED)).sum(1)


def make_objective(config: TrainConfig) -> Objective:
    if config.model.head == "reward":
        return Reward()
    if config.distill is not None:
        return Distill(config.distill.top, config.answers_folder)
    if config.data.kind == "prompts":
        return Grpo(config.grpo) if config.ppo is None else Ppo(config.ppo)
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
