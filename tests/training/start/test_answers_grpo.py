"""GRPO beside TRL's trainer, whose figures are recorded, so TRL need not be installed; advantages; groups without a lesson."""

from typing import Any

import pytest
import torch
from helpers.training.adapted_llama import adapted_llama
from torch import Tensor

from tightwire.training.config.learning import GrpoConfig, LoraConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.start.answers import Answer, Answers, Grpo, advantages_of

_PROMPT_TOKENS, _ANSWER_TOKENS = 4, (6, 3, 5, 6)
# (loss, norm of all gradients) by beta and clip, of trl 1.16.0: GRPOTrainer._compute_loss with loss_type dapo, and the sampler's
# importance weights cut at 2.0, on `_groups()`.
_TRL = {
    (0.0, 0.2): (-0.04796021059155464, 0.14145647338511003),
    (0.04, 0.2): (-0.04782414436340332, 0.1412845416092537),
    (0.5, 0.1): (-0.010929226875305176, 0.12824453951795117),
}


def _groups() -> Answers:
    """Four answers; the sampler's and the first step's log-probabilities are off by up to 1 and 0.4."""
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(0, 80, (_PROMPT_TOKENS,), generator=generator).tolist()
    answers = [
        Answer(torch.randint(0, 80, (n,), generator=generator).tolist(), [0.0] * n, True) for n in _ANSWER_TOKENS
    ]
    groups = Answers.of([prompt] * 4, answers, torch.tensor([1.2, -0.7, 0.4, -0.9]), torch.ones(4).bool())
    with torch.no_grad():
        logprobs_BS = _logprobs(adapted_llama(LoraConfig(rank=4, alpha=8)), groups)
    off = torch.rand(2, *logprobs_BS.shape, generator=generator) * 2 - 1
    counted_BS = groups.targets_BS != IGNORED
    groups.old_BS = (logprobs_BS + 0.4 * off[0]) * counted_BS
    groups.sampled_BS = (groups.old_BS + off[1]) * counted_BS
    return groups


def _logprobs(model: Any, groups: Answers) -> Tensor:
    logprobs_BSV = model(groups.inputs_BS).logits.log_softmax(-1)
    return logprobs_BSV.gather(2, groups.targets_BS.clamp(min=0)[..., None])[..., 0] * (groups.targets_BS != IGNORED)


@pytest.mark.parametrize(("beta", "clip"), _TRL)
def test_loss_and_gradients_equal_those_of_trl(beta: float, clip: float) -> None:
    model: Any = adapted_llama(LoraConfig(rank=4, alpha=8))

    loss, sums = Grpo(GrpoConfig(beta=beta, clip=clip, most_weight=2.0)).loss(model, _groups())
    loss.backward()

    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([grad.double().norm() for grad in grads]).norm()
    assert (loss.item(), norm.item()) == pytest.approx(_TRL[beta, clip], rel=1e-5)
    kl, clipped, truncated, *_ = (sums / sum(_ANSWER_TOKENS)).tolist()
    assert (kl > 0) == (beta > 0)
    assert 0 < clipped < 1 and 0 < truncated < 1


def test_the_first_step_with_answers_has_ratios_of_one_and_clips_nothing() -> None:
    model, groups = adapted_llama(LoraConfig(rank=4, alpha=8)), _groups()
    groups.old_BS = None

    loss, sums = Grpo(GrpoConfig(beta=0.0, most_weight=1e-3)).loss(model, groups)

    advantages_BS = groups.scores_B[:, None] * (groups.targets_BS != IGNORED)
    assert loss.item() == pytest.approx(-1e-3 * advantages_BS.sum().item() / sum(_ANSWER_TOKENS))
    assert groups.old_BS is not None and sums[1] == 0


def test_probabilities_are_those_at_the_temperature() -> None:
    model, groups = adapted_llama(LoraConfig(rank=4, alpha=8)), _groups()
    groups.old_BS, counted_BS = None, groups.targets_BS != IGNORED

    Grpo(GrpoConfig(temperature=0.5)).loss(model, groups)

    with torch.no_grad():
        scores_BSV = (2 * model(groups.inputs_BS).logits).log_softmax(-1)
    wanted_BS = scores_BSV.gather(2, groups.targets_BS.clamp(min=0)[..., None])[..., 0] * counted_BS
    torch.testing.assert_close(groups.old_BS, wanted_BS)


def test_the_kl_of_equal_probabilities_is_never_below_zero() -> None:
    model, groups = adapted_llama(LoraConfig(rank=4, alpha=8)), _groups()
    groups.old_BS, generator = None, torch.Generator().manual_seed(0)
    grpo = Grpo(GrpoConfig(beta=0.0))
    grpo.loss(model, groups)
    assert groups.old_BS is not None
    groups.sampled_BS = groups.old_BS + 1e-6 * torch.rand(groups.old_BS.shape, generator=generator)

    _, sums = grpo.loss(model, groups)

    assert 0 <= sums[grpo.figures.index("mismatch_kl")] < 1e-9


def test_advantages_are_those_of_grpo_and_of_rloo() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]])

    group, left_out = (advantages_of(rewards_PG, kind) for kind in ("group", "leave-one-out"))

    assert group[0].tolist() == pytest.approx([0.0, -1 / 1.4143135, -1 / 1.4143135, 2 / 1.4143135], abs=1e-6)
    assert left_out[0].tolist() == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3])
    assert not group[1].any() and not left_out[1].any()


def test_answers_that_teach_nothing_are_in_no_mean() -> None:
    model: Any = adapted_llama(LoraConfig(rank=4, alpha=8))
    grpo, groups = Grpo(GrpoConfig()), _groups()
    alone = Answers(*(each[:2] for each in (groups.inputs_BS, groups.targets_BS, groups.sampled_BS, groups.scores_B)))
    alone.old_BS = groups.old_BS[:2] if groups.old_BS is not None else None
    groups.targets_BS[2:] = IGNORED

    assert grpo.weight(groups) == sum(_ANSWER_TOKENS[:2])
    assert grpo.loss(model, groups)[0].item() == pytest.approx(grpo.loss(model, alone)[0].item(), rel=1e-6)

    groups.targets_BS[:] = IGNORED
    loss, sums = grpo.loss(model, groups)
    loss.backward()
    assert grpo.weight(groups) == 0 and loss == 0 and not sums.any()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
