"""DPO and reward models beside TRL's trainers: their figures are recorded, so TRL need not be installed.

DPO's reference is the model without its adapter.
"""

import copy
import math
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.adapted_llama import adapted_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import open_engine, run_groups
from torch import Tensor, nn

from tightwire.training.config.learning import LoraConfig
from tightwire.training.data.chats import IGNORED
from tightwire.training.data.sequences import Batch
from tightwire.training.engine.costs import step_traffic
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups
from tightwire.training.start.lora import computing
from tightwire.training.start.objective import Dpo, Reward

# Where the answer of each row begins and ends; chosen rows, then rejected ones.
_ANSWERS = ((5, 14), (5, 12), (7, 13), (5, 9), (5, 14), (7, 11))
# (loss, norm of all gradients) by beta, of trl 1.16.0: DPOTrainer(small_llama(), peft_config=...)._compute_loss on these rows.
_TRL = {0.1: (0.6907119154930115, 0.12465248275943115), 0.5: (0.6833480000495911, 0.5996500398608963)}


# (loss, norm of all gradients, accuracy, margin) of RewardTrainer.compute_loss on the rows up to their answers' ends.
_TRL_REWARD = (0.7535713315010071, 5.54649672200647, 0.3333333432674408, -0.09542655944824219)


def _pairs() -> Batch:
    tokens_6T = torch.randint(0, 80, (6, 14), generator=torch.Generator().manual_seed(2))
    targets_6S = torch.full((6, 13), IGNORED)
    for row, (begin, end) in enumerate(_ANSWERS):
        targets_6S[row, begin - 1 : end - 1] = tokens_6T[row, begin:end]

    def joined(rows_6S: Tensor) -> Tensor:
        return torch.cat(rows_6S.chunk(2), 1)

    return Batch(joined(tokens_6T[:, :-1]), joined(targets_6S), torch.arange(13).repeat(3, 2))


@pytest.mark.parametrize("beta", _TRL)
def test_loss_and_gradients_of_dpo_equal_those_of_trl(beta: float) -> None:
    model: Any = adapted_llama(LoraConfig(rank=4, alpha=8))

    loss, (num_right, margins) = Dpo(beta).loss(model, _pairs())
    loss.backward()

    assert loss.item() == pytest.approx(_TRL[beta][0], abs=1e-6)
    assert _norm(model) == pytest.approx(_TRL[beta][1], rel=1e-5)
    with torch.no_grad():
        alone = [Dpo(beta).loss(model, pair)[0] for pair in _pairs().split(1)]
    assert num_right.item() == sum(loss.item() < math.log(2) for loss in alone)
    assert margins.item() == pytest.approx(-sum(math.log(math.expm1(loss.item())) for loss in alone), abs=1e-5)


def _norm(model: Any) -> float:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([grad.double().norm() for grad in grads]).norm().item()


def _scored_llama() -> Any:
    """A small Llama with adapters and the head of a reward model, both random."""
    model: Any = adapted_llama(LoraConfig(rank=4, alpha=8))
    model.lm_head = nn.Linear(32, 1, bias=False)
    nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(3))
    return model


def test_loss_gradients_and_figures_of_a_reward_model_equal_those_of_trl() -> None:
    model, pairs = _scored_llama(), _pairs()
    for pair, (chosen, rejected) in enumerate(zip(_ANSWERS[:3], _ANSWERS[3:], strict=True)):
        pairs.targets_BS[pair] = IGNORED
        pairs.targets_BS[pair, [chosen[1] - 2, 13 + rejected[1] - 2]] = 0

    loss, (num_right, margins) = Reward().loss(model, pairs)
    loss.backward()

    # Scores of a few units, whose last bit is 5e-7: CPUs with other vectors round some of them elsewhere.
    assert loss.item() == pytest.approx(_TRL_REWARD[0], abs=4e-6)
    assert _norm(model) == pytest.approx(_TRL_REWARD[1], rel=1e-5)
    assert [num_right.item() / 3, margins.item() / 3] == pytest.approx(_TRL_REWARD[2:], abs=1e-5)


def test_the_model_without_its_adapter_has_the_bits_of_the_base() -> None:
    model, tokens = adapted_llama(LoraConfig(rank=4, alpha=8)), torch.arange(12).view(1, 12)
    with torch.no_grad(), computing(model, "base"):
        assert torch.equal(model(tokens).logits, small_llama()(tokens).logits)
    assert not torch.equal(model(tokens).logits, small_llama()(tokens).logits)


@torch.no_grad()
def test_pairs_without_an_answer_do_not_count_in_an_evaluation() -> None:
    model, pairs = adapted_llama(LoraConfig(rank=4, alpha=8)), _pairs()
    count, total, *_ = Dpo(0.1).total(model, pairs)
    pairs.targets_BS[0] = IGNORED
    two, less, *_ = Dpo(0.1).total(model, pairs)

    assert (count, two) == (3, 2) and less != pytest.approx(total)
    assert total / count == pytest.approx(_TRL[0.1][0], abs=1e-6)


def test_ranks_compute_the_same_and_send_what_the_formula_says() -> None:
    """The reference's forward gathers the blocks once more in each micro-batch."""
    pairs, model = _pairs(), adapted_llama(LoraConfig(rank=4, alpha=8))
    plans = []

    def run_rank(groups: TrainGroups) -> tuple[float, int]:
        own = copy.deepcopy(model)
        with open_engine(own, groups, EngineOptions()) as engine:
            plans.append(engine.plan)
            for last in (False, True):
                with engine.micro_batch(last=last):
                    loss, _ = Dpo(0.1).loss(own, pairs)
                    (loss / 2).backward()
            engine.finish_gradients()
            sent = sum(count.bytes_sent for count in groups.gather.ledger.counters.counts())
            return engine.gradient_norm(), sent

    results = run_groups(in_process_train_groups(4), run_rank)

    flows = step_traffic(
        plans[0], EngineOptions(), num_nodes=1, ranks_per_node=4, accumulation=2, first=True, forwards=2
    )
    expected = sum(flow.calls * flow.bytes_sent for flow in flows if flow.lane == "gather")
    for norm, sent in results:
        assert norm == pytest.approx(_TRL[0.1][1], rel=1e-5)
        assert sent == expected
