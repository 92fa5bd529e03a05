"""An engine beside a trainer has no matrices of its own where the trainer has them whole, as kernels read them; it answers the same."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.training.training_runs import log_lines, make_prompt_config, train

from tightwire.kernels.spec.packed import PackedMatrix, StackedMatrix, Weight
from tightwire.post_training import make_engines
from tightwire.rollout_engine import RolloutEngine
from tightwire.run_page import SAMPLES
from tightwire.training.engine.shards import FrozenShard

_LAYERS, _OUTER, _IN_LAYER = 3, {"embedding", "head"}, {"qkv", "attention_out", "gate_up", "down"}
_ALL = _OUTER | _IN_LAYER
_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": _LAYERS}
_REWARD = "grpo={rewards: ['test_rollout_weights:early_letters'], samples: 2, answer_tokens: 8}"


def early_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(letter < "p" for letter in text) / max(1, len(text)) for text in completions]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def _first_bytes(weight: Weight) -> list[int]:
    parts = weight.parts if isinstance(weight, StackedMatrix) else [weight]
    return [(part.blocks_OB if isinstance(part, PackedMatrix) else part).data_ptr() for part in parts]


def _run(folder: Path, run: str, base: str, *overrides: str, world_size: int = 1, apart: bool = False) -> Any:
    """The matrices of rank 0's engine that are the trainer's memory, in all layers, the answers, and the ratios of the first step.

    ``apart``: the engine is not told of the trainer's.
    """
    steps = "schedule={steps: 2, warmup_steps: 0}", "batch={sequences: 4, micro_sequences: 1}"
    start = f"model.start={base}" if base else "model.lora.rank=4"
    config = make_prompt_config(folder, _REWARD, *steps, start, *overrides, shape=_SIZES, run=run)
    shared: set[str] = set(_ALL)

    def open_engine(start: Any, config: Any, group: Any, most: int, frozen: Collection[FrozenShard]) -> RolloutEngine:
        engine = RolloutEngine(start, config, group, most, () if apart else frozen)
        own = [shard.wire() for shard in frozen]
        weights = engine._rank.runner._model.weights
        layers = [(name, getattr(weights.layer(layer), name)) for name in _IN_LAYER for layer in range(_LAYERS)]
        for name, weight in [*layers, *((name, getattr(weights.outer, name)) for name in _OUTER)]:
            starts = _first_bytes(weight)
            if not all(any(0 <= at - each.data_ptr() < each.nbytes for each in own) for at in starts):
                shared.discard(name)
        return engine

    train(config, world_size, engines=make_engines()._replace(open=open_engine))
    return shared, (Path(config.run) / SAMPLES).read_text(), log_lines(config)[1]["mismatch"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_numbers_in_the_computing_dtype_are_shared(tmp_path: Path, dtype: str, sharding: str) -> None:
    how = f"parallel.sharding={sharding}", f"model.compute_dtype={dtype}"
    shared, answers, _ = _run(tmp_path, "together", "", *how)
    none, same, _ = _run(tmp_path, "apart", "", *how, apart=True)
    assert (shared, none) == (_ALL, set())
    assert answers == same


def test_packed_blocks_are_shared_and_numbers_of_another_form_are_not(tmp_path: Path) -> None:
    """Values are in another format than queries and keys, so their product has two parts."""
    base = str(make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", others={"attn_v": "Q6_K"}, **_SIZES))
    packed = "parallel={sharding: zero3, frozen_codec: packed}"
    shared, answers, mismatch = _run(tmp_path, "together", base, packed)
    none, same, _ = _run(tmp_path, "apart", base, packed, apart=True)
    assert (shared, none) == (_ALL, set())
    assert answers == same
    assert mismatch < 1e-4  # the trainer decodes the bytes that the engine multiplies with
    decoded, *_ = _run(tmp_path, "decoded", base, "parallel.sharding=zero3")
    assert decoded == set()


def test_a_matrix_beside_packed_ones_is_read_where_the_engine_joins_them_as_numbers(tmp_path: Path) -> None:
    """The engine's product reads queries, keys and values as numbers, because the file has the keys as numbers."""
    base = str(make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", others={"attn_k": "F16"}, **_SIZES))
    shared, _, mismatch = _run(tmp_path, "run", base, "parallel={sharding: zero3, frozen_codec: packed}")
    assert shared == _ALL - {"qkv"}
    assert mismatch < 1e-4


def test_parts_and_rounded_numbers_are_not_shared(tmp_path: Path) -> None:
    assert _run(tmp_path, "rounded", "", "parallel={sharding: zero3, frozen_codec: int8}")[0] == set()
    assert _run(tmp_path, "parts", "", "parallel.sharding=zero3", world_size=2)[0] == set()
