"""GRPO and PPO: the losses of answers that the model samples.

With GRPO answers learn from the rewards of their group; RLOO's advantages are an option. A token's loss is
-min(r A, clip(r) A) w + beta KL, averaged over the tokens of the groups that teach something: those whose rewards differ.

    r    its probability now over that of the first step with these answers
    w    that probability over the one it was sampled with, at most ``most_weight``
    KL   k3 to the model without its adapter

Source: GRPO, arXiv 2402.03300; the mean over tokens, DAPO, arXiv 2503.14476; RLOO, arXiv 2402.14740.

With PPO a critic says what reward to expect at each token, and tokens learn how much better they did than that. A token's
reward is -beta (its log-probability above the reference's); an answer's own reward is added to its last token. Advantages
are GAE's, then made to have mean 0 and deviation 1 over all answers. A token's loss is -min(r A, clip(r) A) w + value_weight / 2
max((v - R)^2, (clip(v) - R)^2), where v is the critic's value, and R its first value + A, before A is normed.

Actor, critic and reference are one model, two adapters and none: their rows go through the frozen weights together.

Source: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; with a reference, arXiv 2203.02155; the formulas are those of TRL's PPOTrainer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from tightwire.training.config.learning import AnswersConfig, GrpoConfig, PpoConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.start.lora import Role, computing
from tightwire.training.start.loss import MeanOfTargets

Add = Callable[..., Sequence[Sequence[float]]]  # gathers numbers of all ranks

_LEAST_DEVIATION = 1e-4  # added to a group's, as in TRL


class Answer(NamedTuple):
    """Sampled tokens with the natural-log probability that each was sampled with. ``ended``: the last one is an end token.

    ``tops``: (K,) the most likely tokens at each place, as many as were asked for, and their log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    ended: bool
    tops: Sequence[tuple[np.ndarray, np.ndarray]] = ()


def advantages_of(rewards_PG: Tensor, kind: str) -> Tensor:
    """(P, G): how much better each answer is than its group; ``kind``: of ``GrpoConfig.advantage``."""
    above_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if kind == "leave-one-out":
        num_samples = rewards_PG.shape[1]
        return above_PG * num_samples / (num_samples - 1)  # reward - mean of the others
    return above_PG / (rewards_PG.std(1, keepdim=True) + _LEAST_DEVIATION)


@dataclass(slots=True)
class Answers:
    """The answers of a micro-batch, one a row.

    ``scores_B``: what an answer is learned by: GRPO's advantage, PPO's reward. ``old_BS``: log-probabilities of the targets in
    the first step with these answers, set by ``Grpo.loss``, or with the three after it by ``Ppo.prepare``.
    """

    inputs_BS: Tensor
    targets_BS: Tensor  # the tokens of answers that teach something
    sampled_BS: Tensor  # log-probabilities of the targets when they were sampled
    scores_B: Tensor
    old_BS: Tensor | None = None
    values_BS: Tensor | None = None
    advantages_BS: Tensor | None = None
    returns_BS: Tensor | None = None

    @classmethod
    def of(cls, prompts: Sequence[list[int]], answers: Sequence[Answer], scores_B: Tensor, counts_B: Tensor) -> Self:
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
        return cls(inputs_BS, targets_BS, sampled_BS, scores_B)

    def to(self, device: torch.device) -> Self:
        for name, tensor in self._tensors():
            setattr(self, name, tensor.to(device))
        return self

    @property
    def num_kept(self) -> int:
        """Positions at the end of the rows that have all targets; the others need no logits. Waits for the device."""
        length = self.targets_BS.shape[1]
        return length if self.targets_BS.is_meta else length - int((self.targets_BS != IGNORED).any(0).int().argmax())

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each answer, for JSON; ``from_rows`` has the same bits."""
        lists = {name: tensor.tolist() for name, tensor in self._tensors()}
        return [{name: own[row] for name, own in lists.items()} for row in range(len(self.scores_B))]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        columns = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
        ends = {"targets_BS": IGNORED}
        return cls(
            **{
                name: torch.stack(own) if own[0].dim() == 0 else pad_sequence(own, True, ends.get(name, 0))
                for name, own in columns.items()
            }
        )

    def _tensors(self) -> list[tuple[str, Tensor]]:
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, tensor) for name, tensor in named if tensor is not None]


@dataclass(frozen=True, slots=True)
class OfAnswers(MeanOfTargets):
    """What the losses of GRPO and PPO have in common: means over the tokens of answers, clipped ratios and importance weights."""

    config: AnswersConfig
    score_name: ClassVar[str] = ""  # of an answer's score in ``samples.jsonl``; empty: it is the reward

    def scores(self, rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
        """(P, G): what each answer is learned by, and whether it teaches something."""
        return rewards_PG, torch.ones_like(rewards_PG).bool()

    def group_figures(self, rewards_PG: Tensor) -> dict[str, float]:
        """Figures of the rewards of all ranks' groups, beside their mean."""
        return {}

    def clipped_losses(
        self, logprobs_BS: Tensor, old_BS: Tensor, sampled_BS: Tensor, advantages_BS: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses of the tokens, and their figures: clipped, truncated, mismatch, mismatch_kl."""
        clip, most_weight = self.config.clip, self.config.most_weight
        ratio_BS, off_BS = (logprobs_BS - old_BS).exp(), old_BS - sampled_BS
        gains_BS, clipped_BS = ratio_BS * advantages_BS, ratio_BS.clamp(1 - clip, 1 + clip) * advantages_BS
        weights_BS = off_BS.exp()
        losses_BS = -torch.minimum(gains_BS, clipped_BS) * weights_BS.clamp(max=most_weight)
        return losses_BS, [clipped_BS < gains_BS, weights_BS > most_weight, (weights_BS - 1).abs(), k3(off_BS)]

    def mean(self, losses_BS: Tensor, figures: Sequence[Tensor], counted_BS: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.stack([(figure_BS * counted_BS).sum() for figure_BS in figures])
        return (losses_BS * counted_BS).sum() / counted_BS.sum().clamp(min=1), sums.detach()


@dataclass(frozen=True, slots=True)
class Grpo(OfAnswers):
    """GRPO's loss. Its figures: ``kl``, to the reference; the shares of tokens that are ``clipped``, which learn nothing more, and
    ``truncated``, whose weight is cut; ``mismatch``, mean difference from 1 of trainer's over sampler's probabilities, and their k3.
    """

    config: GrpoConfig
    figures: tuple[str, ...] = ("kl", "clipped", "truncated", "mismatch", "mismatch_kl")
    score_name: ClassVar[str] = "advantage"

    def scores(self, rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
        return advantages_of(rewards_PG, self.config.advantage), ~_even(rewards_PG)[:, None].expand_as(rewards_PG)

    def group_figures(self, rewards_PG: Tensor) -> dict[str, float]:
        even = float(_even(rewards_PG).double().mean())
        return {"reward_deviation": float(rewards_PG.std(1).mean()), "even_groups": even}

    def loss(self, model: Any, batch: Answers) -> tuple[Tensor, Tensor]:
        config, counted_BS = self.config, batch.targets_BS != IGNORED
        reference_BS = None
        if config.beta:  # first: the engine takes no forward between one and its backward
            with torch.no_grad(), computing(model, "base"):
                reference_BS = self._logprobs(model, batch)
        logprobs_BS = self._logprobs(model, batch)
        if batch.old_BS is None:
            batch.old_BS = logprobs_BS.detach()
        losses_BS, figures = self.clipped_losses(logprobs_BS, batch.old_BS, batch.sampled_BS, batch.scores_B[:, None])
        kl_BS = torch.zeros_like(losses_BS)
        if reference_BS is not None:
            kl_BS = k3(reference_BS - logprobs_BS)
            losses_BS = losses_BS + config.beta * kl_BS
        return self.mean(losses_BS, [kl_BS, *figures], counted_BS)

    def _logprobs(self, model: Any, batch: Answers) -> Tensor:
        logits_BKV = model(input_ids=batch.inputs_BS, use_cache=False, logits_to_keep=batch.num_kept).logits
        return logprobs_of(logits_BKV, batch.targets_BS, self.config.temperature)


def _even(rewards_PG: Tensor) -> Tensor:
    """(P,) whether a group's rewards are all the same."""
    return rewards_PG.amax(1) == rewards_PG.amin(1)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimate of a KL that is never negative: r - 1 - log r."""
    return log_ratio.expm1() - log_ratio


def logprobs_of(logits_BKV: Tensor, targets_BS: Tensor, temperature: float) -> Tensor:
    """(B, S) of the targets, which are in the last K positions; 0 elsewhere."""
    length, num_kept = targets_BS.shape[1], logits_BKV.shape[1]
    losses = [
        cross_entropy(row_KV.float() / temperature, targets_K, ignore_index=IGNORED, reduction="none")
        for row_KV, targets_K in zip(logits_BKV, targets_BS[:, -num_kept:], strict=True)
    ]
    return pad(-torch.stack(losses), (length - num_kept, 0))


_LEAST_VARIANCE = 1e-8  # added to that of the advantages, as in TRL


def advantages_of_tokens(rewards_BS: Tensor, values_BS: Tensor, counted_BS: Tensor, gamma: float, lam: float) -> Tensor:
    """(B, S) GAE of each row's counted tokens, which stand side by side; after the last one nothing is expected."""
    advantages_BS = torch.zeros_like(rewards_BS)
    last_B = next_B = torch.zeros_like(rewards_BS[:, 0])
    for at in reversed(range(rewards_BS.shape[1])):
        off_B = rewards_BS[:, at] + gamma * next_B - values_BS[:, at]
        last_B = (off_B + gamma * lam * last_B) * counted_BS[:, at]
        next_B = values_BS[:, at] * counted_BS[:, at]
        advantages_BS[:, at] = last_B
    return advantages_BS


@dataclass(frozen=True, slots=True)
class Ppo(OfAnswers):
    """PPO's loss. Its figures: four as ``Grpo``'s; ``value_loss``, the critic's, without its weight; ``clipped_values``, the share of
    tokens whose value learns nothing more.
    """

    config: PpoConfig
    figures: tuple[str, ...] = ("clipped", "truncated", "mismatch", "mismatch_kl", "value_loss", "clipped_values")

    @torch.no_grad()
    def prepare(self, model: Any, batches: Sequence[Answers], add: Add) -> dict[str, float]:
        """Set what the answers' first step has: probabilities, values, advantages. One forward a batch.

        Returns ``kl``, k3 to the reference, and ``value``, means over tokens.
        """
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in batches:
            counted_BS = batch.targets_BS != IGNORED
            (old_BS, reference_BS), values_BS = self._compute(model, batch, "actor", "base", "critic")
            batch.old_BS, batch.values_BS = old_BS, values_BS * counted_BS
            rewards_BS = -self.config.beta * (old_BS - reference_BS)
            last_B = counted_BS.cumsum(1).argmax(1)
            rewards_BS[torch.arange(len(last_B)), last_B] += batch.scores_B
            given = rewards_BS, batch.values_BS, counted_BS
            batch.advantages_BS = advantages_BS = advantages_of_tokens(*given, self.config.gamma, self.config.lam)
            batch.returns_BS = advantages_BS + batch.values_BS
            each = counted_BS, advantages_BS, advantages_BS.double() ** 2, k3(reference_BS - old_BS), batch.values_BS
            sums += torch.stack([number_BS.double().sum() for number_BS in each]).cpu()
        count, total, squares, kl, values = (sum(numbers) for numbers in zip(*add(*sums.tolist()), strict=True))
        mean = total / max(count, 1)
        variance = max(0.0, squares - count * mean**2) / max(count - 1, 1)  # rounding may leave less than 0
        for batch in batches:
            assert batch.advantages_BS is not None
            normed_BS = (batch.advantages_BS - mean) * (variance + _LEAST_VARIANCE) ** -0.5
            batch.advantages_BS = normed_BS * (batch.targets_BS != IGNORED)
        return {"kl": kl / max(count, 1), "value": values / max(count, 1)}

    def loss(self, model: Any, batch: Answers) -> tuple[Tensor, Tensor]:
        """The loss of a batch that ``prepare`` has seen."""
        config, counted_BS = self.config, batch.targets_BS != IGNORED
        (logprobs_BS,), values_BS = self._compute(model, batch, "actor", "critic")
        old_BS, first_BS, returns_BS = batch.old_BS, batch.values_BS, batch.returns_BS
        advantages_BS = batch.advantages_BS
        assert old_BS is not None and first_BS is not None and returns_BS is not None and advantages_BS is not None
        losses_BS, figures = self.clipped_losses(logprobs_BS, old_BS, batch.sampled_BS, advantages_BS)
        near_BS = first_BS + (values_BS - first_BS).clamp(-config.clip_value, config.clip_value)
        squares_BS, near_squares_BS = (values_BS - returns_BS).square(), (near_BS - returns_BS).square()
        value_losses_BS = 0.5 * torch.maximum(squares_BS, near_squares_BS)
        figures += [value_losses_BS, near_squares_BS > squares_BS]
        return self.mean(losses_BS + config.value_weight * value_losses_BS, figures, counted_BS)

    def _compute(self, model: Any, batch: Answers, *roles: Role) -> tuple[Sequence[Tensor], Tensor]:
        """The targets' (B, S) log-probabilities by each role before the critic, and the critic's values before each target."""
        inputs, num_kept = batch.inputs_BS.repeat(len(roles), 1), batch.num_kept
        with computing(model, *roles):
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=num_kept).logits.chunk(len(roles) - 1)
        logprobs = [logprobs_of(each, batch.targets_BS, self.config.temperature) for each in logits]
        return logprobs, pad(model.lm_head.values, (batch.targets_BS.shape[1] - num_kept, 0))
