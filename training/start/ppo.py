"""PPO: a critic says what reward to expect at each token, and tokens learn how much better they did than that.

A token's reward is -beta (its log-probability above the reference's); an answer's own reward is added to its last token. Advantages
are GAE's, then made to have mean 0 and deviation 1 over all answers. A token's loss is -min(r A, clip(r) A) w + value_weight / 2
max((v - R)^2, (clip(v) - R)^2). r, w: as in ``training.start.grpo``; v: the critic's value; R: its first value + A, before A is normed.

Actor, critic and reference are one model, two adapters and none: their rows go through the frozen weights together.

Source: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; with a reference, arXiv 2203.02155; the formulas are those of TRL's PPOTrainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tightwire.training.config.learning import PpoConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.start.grpo import Add, Answers, OfAnswers, k3, logprobs_of
from tightwire.training.start.lora import Role, computing

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
    """``clipped``, ``truncated``, ``mismatch``, ``mismatch_kl``: as ``Grpo``'s. ``value_loss``: the critic's, without its weight;
    ``clipped_values``: share of tokens whose value learns nothing more.
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
        variance = (squares - count * mean**2) / max(count - 1, 1)
        for batch in batches:
            assert batch.advantages_BS is not None
            normed_BS = (batch.advantages_BS - mean) * (variance + _LEAST_VARIANCE) ** -0.5
            batch.advantages_BS = normed_BS * (batch.targets_BS != IGNORED)
        return {"kl": kl / max(count, 1), "value": values / max(count, 1)}

    def loss(self, model: Any, batch: Answers) -> tuple[Tensor, Tensor]:
        """Of a batch that ``prepare`` has seen."""
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
