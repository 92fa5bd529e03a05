"""The loss that lies in the logits' place is torch's cross-entropy, to the bit, with less memory."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tightwire.training.estimate.memory import LiveBytes
from tightwire.training.start.loss import next_token_loss

_SHAPE = 3, 11, 157


def make_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, logits made of it, and targets of which one does not count."""
    generator = torch.Generator().manual_seed(3)
    leaf = torch.randn(_SHAPE, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, _SHAPE[-1], _SHAPE[:2], generator=generator)
    targets[1, 4] = -100
    return leaf, leaf * 3, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_equals_cross_entropy_to_the_bit(dtype: torch.dtype) -> None:
    leaf, logits, targets = make_case(dtype)
    expected = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    (expected / 7).backward()
    leaf_again, logits, _ = make_case(dtype)

    loss = next_token_loss(logits, targets, _SHAPE[-1], targets)
    (loss / 7).backward()

    assert torch.equal(loss, expected)
    assert leaf.grad is not None and leaf_again.grad is not None
    assert torch.equal(leaf_again.grad, leaf.grad)


def test_the_loss_makes_no_tensor_as_large_as_the_logits() -> None:
    _, logits, targets = make_case(torch.float32)

    with LiveBytes() as live:
        loss = next_token_loss(logits, targets, _SHAPE[-1], targets)
        gradient = torch.autograd.grad(loss, logits)[0]

    assert 0 < live.most < logits.nbytes / 4
    assert gradient.data_ptr() == logits.data_ptr()


def test_a_second_backward_is_refused() -> None:
    _, logits, targets = make_case(torch.float32)
    loss = next_token_loss(logits, targets, _SHAPE[-1], targets)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
