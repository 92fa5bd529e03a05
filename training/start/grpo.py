"""GRPO: what answers learn from the rewards of their group, and its loss. RLOO's advantages are an option.

A token's loss is -min(r A, clip(r) A) w + beta KL. r: its probability now over that of the first step with these answers. w: that
probability over the one it was sampled with, at most ``most_weight``. KL: k3 to the model without its adapter.
The mean is over the tokens of the groups that teach something: those whose rewards differ.

Source: GRPO, arXiv 2402.03300; the mean over tokens, DAPO, arXiv 2503.14476; RLOO, arXiv 2402.14740.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tightwire.training.config.grpo import GrpoConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.start.lora import without_adapter

_LEAST_DEVIATION = 1e-4  # added to a group's, as in TRL


class Answer(NamedTuple):
    """Sampled tokens with the natural-log probability that each was sampled with. ``ended``: the last one is an end token."""

    token_ids: list[int]
    logprobs: list[float]
    ended: bool


def advantages_of(rewards_PG: Tensor, kind: str) -> Tensor:
    """(P, G): how much better each answer is than its group; ``kind``: of ``GrpoConfig.advantage``."""
    above_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if kind == "leave-one-out":
        num_samples = rewards_PG.shape[1]
        return above_PG * num_samples / (num_samples - 1)  # reward - mean of the others
    return above_PG / (rewards_PG.std(1, keepdim=True) + _LEAST_DEVIATION)


@dataclass(slots=True)
class Groups:
    """The answers of a micro-batch, one a row. ``old_BS``: the log-probabilities of their first step, set by ``Grpo.loss``."""

    inputs_BS: Tensor
    targets_BS: Tensor  # the answers' tokens of groups whose rewards differ
    sampled_BS: Tensor  # log-probabilities of the targets when they were sampled
    advantages_B: Tensor
    old_BS: Tensor | None = None

    @classmethod
    def of(
        cls, prompts: Sequence[list[int]], answers: Sequence[Answer], advantages_B: Tensor, counts_B: Tensor
    ) -> Self:
        """``prompts``: the tokens before each answer. ``counts_B``: False for answers that teach nothing."""
        length = max(len(prompt) + len(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)) - 1
        size = len(answers), length
        inputs_BS, targets_BS, sampled_BS = torch.zeros(size).long(), torch.full(size, IGNORED), torch.zeros(size)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = torch.tensor([*prompt, *answer.token_ids])
            inputs_BS[row, : len(tokens) - 1] = tokens[:-1]
            if counts_B[row]:
                targets_BS[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
                sampled_BS[row, len(prompt) - 1 : len(tokens) - 1] = torch.tensor(answer.logprobs)
        return cls(inputs_BS, targets_BS, sampled_BS, advantages_B)

    def to(self, device: torch.device) -> Self:
        for name in ("inputs_BS", "targets_BS", "sampled_BS", "advantages_B"):
            setattr(self, name, getattr(self, name).to(device))
        return self


@dataclass(frozen=True, slots=True)
class Grpo:
    """``kl``: to the reference. ``clipped``: share of tokens that learn nothing more. ``truncated``: of those whose weight is cut.
    ``mismatch``: mean difference from 1 of trainer's over sampler's probabilities; ``mismatch_kl``: the k3 of both.
    """

    config: GrpoConfig
    figures: tuple[str, ...] = ("kl", "clipped", "truncated", "mismatch", "mismatch_kl")

    def loss(self, model: Any, batch: Groups) -> tuple[Tensor, Tensor]:
        config, counted_BS = self.config, batch.targets_BS != IGNORED
        reference_BS = None
        if config.beta:  # first: the engine takes no forward between one and its backward
            with torch.no_grad(), without_adapter(model):
                reference_BS = _logprobs(model, batch, config.temperature)
        logprobs_BS, advantages_B1 = _logprobs(model, batch, config.temperature), batch.advantages_B[:, None]
        if batch.old_BS is None:
            batch.old_BS = logprobs_BS.detach()
        ratio_BS = (logprobs_BS - batch.old_BS).exp()
        off_BS = batch.old_BS - batch.sampled_BS
        gains_BS = ratio_BS * advantages_B1
        clipped_BS = ratio_BS.clamp(1 - config.clip, 1 + config.clip) * advantages_B1
        losses_BS = -torch.minimum(gains_BS, clipped_BS) * off_BS.exp().clamp(max=config.most_weight)
        kl_BS = torch.zeros_like(losses_BS)
        if reference_BS is not None:
            kl_BS = _k3(reference_BS - logprobs_BS)
            losses_BS = losses_BS + config.beta * kl_BS
        figures = (
            kl_BS,
            clipped_BS < gains_BS,
            off_BS.exp() > config.most_weight,
            (off_BS.exp() - 1).abs(),
            _k3(off_BS),
        )
        sums = torch.stack([(figure_BS * counted_BS).sum() for figure_BS in figures])
        return (losses_BS * counted_BS).sum() / counted_BS.sum().clamp(min=1), sums.detach()

    def weight(self, batch: Groups) -> int:
        return int((batch.targets_BS != IGNORED).sum())

    def total(self, model: Any, batch: Groups) -> list[float]:
        loss, sums = self.loss(model, batch)
        return [self.weight(batch), float(loss) * self.weight(batch), *sums.tolist()]


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimate of a KL that is never negative: r - 1 - log r."""
    return log_ratio.expm1() - log_ratio


def _logprobs(model: Any, batch: Groups, temperature: float) -> Tensor:
    """(B, S) of the targets; 0 elsewhere."""
    logits_BSV = model(input_ids=batch.inputs_BS, use_cache=False).logits
    own = zip(logits_BSV.unbind(), batch.targets_BS.unbind(), strict=True)
    losses = [
        cross_entropy(row_SV.float() / temperature, targets_S, ignore_index=IGNORED, reduction="none")
        for row_SV, targets_S in own
    ]
    return -torch.stack(losses)
