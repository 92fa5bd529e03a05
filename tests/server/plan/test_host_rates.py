"""A measurement of this machine with a small model."""

import math

import msgspec
import pytest

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import choose_formats
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan import host_rates
from tightwire.server.plan.layout_table import work_of
from tightwire.server.plan.rank_bytes import MemoryInputs


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_rates_are_numbers_of_a_machine(monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    monkeypatch.setattr(host_rates, "_EACH_S", 0.01)
    monkeypatch.setattr(host_rates, "_LEAST_BYTES", 1 << 20)
    model = LlamaConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=128,
        vocab_size=96,
        max_positions=128,
    )
    inputs = MemoryInputs(
        model=model,
        layout=make_layout(model, 1),
        options=EngineOptions(),
        pools=(),
        dtype="bfloat16",
        formats=choose_formats(RandomReader(model, 0), model, quantization),
        device="cpu",
    )
    rates = host_rates.measure_rates(inputs, work_of(inputs))
    assert all(0 < rate < math.inf for rate in msgspec.to_builtins(rates).values())
