"""Operations per token against torch's counter, and the peak rate of a CPU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.estimate import step
from tightwire.training.estimate.step import flops_per_token, peak_flops
from tightwire.training.start.model import build_model

_CPU = torch.device("cpu")
_SEQUENCES, _TOKENS = 2, 128
_LLAMA = LlamaConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_size=96,
    vocab_size=300,
    max_positions=512,
)


def _loss() -> torch.Tensor:
    """Of a real model."""
    model = build_model(_LLAMA, device=_CPU)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.zeros_(tensor)
    ids = torch.zeros(_SEQUENCES, _TOKENS, dtype=torch.int64)
    return model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss


def test_operations_of_products_equal_torchs_count() -> None:
    with FlopCounterMode(display=False) as counted:
        _loss().backward()

    attention = 12 * _LLAMA.num_layers * _LLAMA.num_heads * _LLAMA.head_dim * _TOKENS  # torch counts none on a CPU
    assert flops_per_token(_LLAMA, _TOKENS) - attention == counted.get_total_flops() / (_SEQUENCES * _TOKENS)


def test_a_cpu_is_measured() -> None:
    assert peak_flops(_CPU, torch.float32) > 0


def test_what_a_cpu_multiplies_slowly_is_measured_with_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, product = set[int](), torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows.add(len(a))
        return product(a, b)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(step, "_LONGEST_PRODUCT_S", 1e-12)
    assert peak_flops(_CPU, torch.float32) > 0
    assert rows == {256}


@pytest.mark.parametrize(("bfloat16_flops", "advised"), [(1e9, "70 times"), (5e10, ""), (1e12, "")])
def test_a_dtype_that_a_cpu_multiplies_slowly_is_advised_against(
    monkeypatch: pytest.MonkeyPatch, bfloat16_flops: float, advised: str
) -> None:
    monkeypatch.setattr(step, "peak_flops", lambda device, dtype: 7e10)

    assert [advised in text for text in step.dtype_advice(_CPU, torch.bfloat16, bfloat16_flops)] == (
        [True] if advised else []
    )
    assert not list(step.dtype_advice(_CPU, torch.float32, 1e9))
    assert not list(step.dtype_advice(torch.device("cuda"), torch.bfloat16, 1e9))
