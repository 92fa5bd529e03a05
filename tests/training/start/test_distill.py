"""The loss of a distillation beside torch's KL, as TRL's GKDTrainer computes it, and its gradients, figures and memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.small_llama import small_llama
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from tightwire.training.data.chats import IGNORED
from tightwire.training.data.sequences import Batch
from tightwire.training.estimate.memory import LiveBytes
from tightwire.training.start.distill import Distill, forward_kl

_ROWS, _VOCAB = 37, 80


def _logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def _trl_loss(student_NV: Tensor, teacher_NV: Tensor, learned_N: Tensor) -> Tensor:
    """``GKDTrainer.generalized_jsd_loss`` of trl 1.16.0 with beta=0, the forward KL, reduction "batchmean"."""
    each_NV = kl_div(log_softmax(student_NV, -1), log_softmax(teacher_NV, -1), reduction="none", log_target=True)
    return each_NV[learned_N].sum() / learned_N.sum()


def _top(teacher_NV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    logs_NK, ids_NK = log_softmax(teacher_NV, -1).topk(num)
    return ids_NK, logs_NK


@pytest.mark.parametrize("top", [_VOCAB, 7, 1])
def test_loss_and_gradient_equal_torchs_forward_kl(top: int) -> None:
    student, teacher, learned_N = (
        _logits(1, _ROWS, _VOCAB).requires_grad_(),
        _logits(2, _ROWS, _VOCAB),
        torch.arange(_ROWS) % 5 > 0,
    )
    ids_NK, logs_NK = _top(teacher, top)
    kept_NV = torch.full_like(teacher, -torch.inf).scatter(1, ids_NK, logs_NK)  # its softmax divides by the kept sum
    expected = _trl_loss(student, kept_NV.clamp(min=-1e4), learned_N)
    (expected / 3).backward()
    again = student.detach().clone().requires_grad_()

    loss, best_N = forward_kl(again * 1, ids_NK, logs_NK.softmax(1) * learned_N[:, None])
    (loss / 3).backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert again.grad is not None and student.grad is not None
    torch.testing.assert_close(again.grad, student.grad, rtol=1e-5, atol=1e-8)
    assert torch.equal(best_N, student.argmax(1))


def test_no_row_to_learn_has_no_loss_and_no_gradient() -> None:
    student = _logits(1, 4, _VOCAB).requires_grad_()
    loss, _ = forward_kl(student * 1, torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3))
    loss.backward()
    assert loss.item() == 0 and student.grad is not None and not student.grad.any()


def test_the_loss_makes_no_tensor_as_large_as_the_logits() -> None:
    logits, (ids_NK, logs_NK) = _logits(1, 64, 1000).requires_grad_() * 1, _top(_logits(2, 64, 1000), 8)
    with LiveBytes() as live:
        forward_kl(logits, ids_NK, logs_NK.softmax(1))[0].backward()
    # The leaf's gradient is the one whole tensor: torch clones it, because the logits' memory holds it too.
    assert live.most < logits.nbytes * 1.5


def _recorded(folder: Path, teacher_PV: Tensor, top: int) -> None:
    ids_PK, logs_PK = _top(teacher_PV, top)
    (folder / "00000.jsonl").touch()
    np.savez(folder / "00000.npz", ids=ids_PK.int().numpy(), logs=logs_PK.numpy())


def test_a_model_learns_from_the_rows_that_its_targets_name(tmp_path: Path) -> None:
    model: Any = small_llama()
    tokens_2T = torch.randint(0, _VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    targets_2S = torch.full((2, 11), IGNORED)
    targets_2S[0, 4:9], targets_2S[1, 2:5] = torch.arange(5), torch.arange(5, 8)
    batch = Batch(tokens_2T[:, :-1], targets_2S, torch.arange(11).repeat(2, 1))
    teacher_8V = _logits(4, 8, _VOCAB)
    _recorded(tmp_path, teacher_8V, _VOCAB)
    learned_N = (targets_2S != IGNORED).flatten()
    student_8V = model(input_ids=batch.inputs_BS).logits.flatten(0, 1)[learned_N]
    expected = _trl_loss(student_8V, teacher_8V, torch.ones(8).bool())
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    objective = Distill(_VOCAB, tmp_path)
    loss, (greedy, sampled) = objective.loss(model, batch)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and objective.weight(batch) == 8
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)
    best_8 = student_8V.argmax(1)
    assert greedy.item() == (best_8 == teacher_8V.argmax(1)).sum()
    assert sampled.item() == pytest.approx(teacher_8V.softmax(1)[torch.arange(8), best_8].sum().item(), rel=1e-5)
    with torch.no_grad():
        count, total, *_ = objective.total(model, batch)
    assert (count, total) == (8, pytest.approx(8 * expected.item(), rel=1e-5))
