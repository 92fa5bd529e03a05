"""PPO beside the code of TRL's trainer, whose figures are recorded, so TRL need not be installed; GAE; ragged answers."""

from typing import Any

import pytest
import torch
from helpers.training.adapted_llama import adapted_llama
from torch import Tensor

from tightwire.training.config.learning import LoraConfig, PpoConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.start.answers import Answer, Answers, Ppo, advantages_of_tokens
from tightwire.training.start.lora import computing

_PROMPT_TOKENS, _SCORES = 4, (1.0, -0.5, 0.25, 0.75)
# (loss, critic's loss, norm of all gradients, first token's advantages, its returns) by gamma and lambda. trl 1.0.0, the last version with
# PPO: the lines of PPOTrainer.train from the rewards to the loss, on `_answers(6, 6, 6, 6)`, which all end without padding, behind which TRL
# would add the score one token later.
_TRL: dict[tuple[float, float], tuple[float, ...]] = {
    (1.0, 0.95): (
        -0.004691329784691334,
        0.14528368413448334,
        0.13820108554154611,
        0.6794483661651611,
        -1.2400438785552979,
        -0.7580519318580627,
        0.8158830404281616,
        0.8206099271774292,
        -0.2986147403717041,
        0.3030395209789276,
        0.6523800492286682,
    ),
    (0.9, 0.7): (
        -0.018512584269046783,
        0.05991334840655327,
        0.12845358088219183,
        -0.12419989705085754,
        -0.42602434754371643,
        -0.9286956787109375,
        0.12547113001346588,
        0.36469852924346924,
        0.15531718730926514,
        0.34181565046310425,
        0.20545266568660736,
    ),
}


def _model() -> Any:
    return adapted_llama(LoraConfig(rank=4, alpha=8), critic=True)


def _answers(*lengths: int) -> Answers:
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 80, (len(lengths), _PROMPT_TOKENS), generator=generator).tolist()
    answers = [
        Answer(torch.randint(0, 80, (length,), generator=generator).tolist(), [0.0] * length, True)
        for length in lengths
    ]
    return Answers.of(prompts, answers, torch.tensor(_SCORES[: len(lengths)]), torch.ones(len(lengths)).bool())


def _alone(*numbers: float) -> list[tuple[float, ...]]:
    return [numbers]


def _moved(answers: Answers) -> Answers:
    """The same, whose first probabilities and values differ from the model's by up to 0.4, so that some are clipped."""
    assert answers.old_BS is not None and answers.values_BS is not None
    off = torch.rand(2, *answers.old_BS.shape, generator=torch.Generator().manual_seed(5)) * 2 - 1
    counted_BS = answers.targets_BS != IGNORED
    answers.old_BS = (answers.old_BS + 0.4 * off[0]) * counted_BS
    answers.values_BS = (answers.values_BS + 0.4 * off[1]) * counted_BS
    answers.sampled_BS = answers.old_BS
    return answers


@pytest.mark.parametrize(("gamma", "lam"), _TRL)
def test_advantages_loss_and_gradients_equal_those_of_trl(gamma: float, lam: float) -> None:
    model, answers = _model(), _answers(6, 6, 6, 6)
    ppo = Ppo(PpoConfig(gamma=gamma, lam=lam, beta=0.2, value_weight=0.1))

    figures = ppo.prepare(model, [answers], _alone)
    loss, sums = ppo.loss(model, _moved(answers))
    loss.backward()

    assert answers.advantages_BS is not None and answers.returns_BS is not None
    parts = [answers.advantages_BS[:, 3], answers.returns_BS[:, 3]]
    grads = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]
    own = loss.item(), (sums[4] / 24).item(), torch.cat([grad.flatten() for grad in grads]).norm().item()
    assert (*own, *torch.cat(parts).tolist()) == pytest.approx(_TRL[gamma, lam], rel=1e-5)
    clipped, *_, clipped_values = (sums / 24).tolist()
    assert 0 < clipped < 1 and 0 < clipped_values < 1 and figures["kl"] > 0


def test_actor_base_and_critic_in_one_forward_are_those_of_forwards_of_their_own() -> None:
    model, tokens = _model(), torch.arange(12).view(2, 6)

    with torch.no_grad(), computing(model, "actor", "base", "critic"):
        together = model(tokens.repeat(3, 1)).logits
        values = model.lm_head.values
    with torch.no_grad(), computing(model, "actor"):
        actor = model(tokens).logits
    with torch.no_grad(), computing(model, "base"):
        base = model(tokens).logits
    for layer in model.modules():  # the critic's adapter as the only one
        if hasattr(layer, "critic_A"):
            layer.lora_A, layer.lora_B = layer.critic_A, layer.critic_B
    with torch.no_grad(), computing(model, "actor"):
        critic = model.lm_head.value(model.model(tokens).last_hidden_state)[..., 0]

    torch.testing.assert_close(together, torch.cat([actor, base]))
    torch.testing.assert_close(values, critic)
    assert (actor - base).abs().max() > 0.01


def test_gae_of_each_answer_is_the_sum_of_its_discounted_errors() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards_BS, values_BS = torch.randn(2, 3, 9, generator=generator)
    spans = (range(2, 9), range(3, 5), range(4, 5))
    counted_BS = torch.tensor([[at in span for at in range(9)] for span in spans])

    advantages_BS = advantages_of_tokens(rewards_BS * counted_BS, values_BS, counted_BS, gamma=0.9, lam=0.7)

    for row, span in enumerate(spans):
        values = [*values_BS[row, span.start : span.stop].tolist(), 0.0]
        errors = [rewards_BS[row, at].item() + 0.9 * values[n + 1] - values[n] for n, at in enumerate(span)]
        for n, at in enumerate(span):
            wanted = sum((0.9 * 0.7) ** k * error for k, error in enumerate(errors[n:]))
            assert advantages_BS[row, at].item() == pytest.approx(wanted, rel=1e-5)
    assert not advantages_BS[~counted_BS].any()


def test_answers_learn_the_same_beside_longer_ones_and_over_two_batches() -> None:
    model, ppo = _model(), Ppo(PpoConfig(beta=0.2))
    together = _answers(6, 3, 5, 1)
    parts = [_rows(together, slice(0, 2)), _rows(together, slice(2, 4))]

    ppo.prepare(model, [together], _alone)
    ppo.prepare(model, parts, _alone)

    # The prompts have no logits.
    assert (together.inputs_BS.shape[1], together.num_kept, parts[1].num_kept) == (9, 6, 6)
    for name in ("old_BS", "values_BS", "advantages_BS", "returns_BS"):
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in parts]), getattr(together, name))
    advantages = together.advantages_BS
    assert advantages is not None
    taught = advantages[together.targets_BS != IGNORED]
    assert taught.mean().item() == pytest.approx(0, abs=1e-6) and taught.std().item() == pytest.approx(1, rel=1e-5)
    losses = [ppo.loss(model, part)[0] * ppo.weight(part) for part in parts]
    assert sum(losses).item() / 15 == pytest.approx(ppo.loss(model, together)[0].item(), rel=1e-5)  # pyright: ignore[reportAttributeAccessIssue]


def test_large_rewards_that_are_all_the_same_teach_nothing() -> None:
    model, answers = _model(), _answers(*[1] * 54)
    torch.nn.init.zeros_(model.lm_head.value.weight)  # as before the first step
    answers.scores_B = torch.full((54,), -31415.9)

    Ppo(PpoConfig(beta=0)).prepare(model, [answers], _alone)

    assert answers.advantages_BS is not None and answers.advantages_BS.dtype == torch.float32
    assert not answers.advantages_BS.any()


def test_rows_of_json_have_the_same_bits() -> None:
    model, answers = _model(), _answers(6, 3)
    Ppo(PpoConfig()).prepare(model, [answers], _alone)

    again = Answers.from_rows(answers.rows())

    for name in ("inputs_BS", "targets_BS", "sampled_BS", "scores_B", "old_BS", "advantages_BS", "returns_BS"):
        assert torch.equal(getattr(again, name), getattr(answers, name)), name


def _rows(answers: Answers, rows: slice) -> Answers:
    tensors: list[Tensor] = [answers.inputs_BS, answers.targets_BS, answers.sampled_BS, answers.scores_B]
    return Answers(*(tensor[rows] for tensor in tensors))
