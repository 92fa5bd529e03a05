"""An engine beside a trainer has no matrices of its own where the trainer has them whole, as kernels read them; it answers the same."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.training.training_runs import log_lines, make_prompt_config, train
from torch import Tensor

from tightwire.comm.group.topology import Topology
from tightwire.kernels.spec.packed import PackedMatrix, StackedMatrix, Weight
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.post_training import make_engines
from tightwire.rollout_engine import RolloutEngine, engine_bytes
from tightwire.rollout_weights import GatheredLayers
from tightwire.run_page import SAMPLES
from tightwire.training.engine.engine import Engine
from tightwire.training.start.answers import Answer

_LAYERS, _OUTER, _IN_LAYER = 3, {"embedding", "head"}, {"qkv", "attention_out", "gate_up", "down"}
_ALL = _OUTER | _IN_LAYER
_SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": _LAYERS}
_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": _LAYERS}
_REWARD = "grpo={rewards: ['test_rollout_weights:early_letters'], samples: 2, answer_tokens: 8}"


def early_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(letter < "p" for letter in text) / max(1, len(text)) for text in completions]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def _first_bytes(weight: Weight) -> list[int]:
    return [part.data_ptr() for part in _tensors(weight)]


def _run(folder: Path, run: str, base: str, *overrides: str, world_size: int = 1, apart: bool = False) -> Any:
    """The matrices of rank 0's engine that are the trainer's memory, in all layers, the answers, and the ratios of the first step.

    ``apart``: the engine is not told of the trainer's.
    """
    steps = "schedule={steps: 2, warmup_steps: 0}", "batch={sequences: 4, micro_sequences: 1}"
    start = f"model.start={base}" if base else "model.lora.rank=4"
    config = make_prompt_config(folder, _REWARD, *steps, start, *overrides, shape=_SIZES if base else _SMALL, run=run)
    shared: set[str] = set(_ALL)
    kept: list[tuple[Tensor, Tensor]] = []

    def open_engine(start: Any, config: Any, group: Any, most: int, trainer: Engine) -> RolloutEngine:
        engine = RolloutEngine(start, config, group, most, None if apart else trainer)
        own = [shard.wire() for shard in trainer.frozen_shards.values()]
        kept.extend((each, each.clone()) for each in own)
        weights = engine._rank.runner._model.weights
        layers = [(name, getattr(weights.layer(layer), name)) for name in _IN_LAYER for layer in range(_LAYERS)]
        for name, weight in [*layers, *((name, getattr(weights.outer, name)) for name in _OUTER)]:
            starts = _first_bytes(weight)
            if not all(any(0 <= at - each.data_ptr() < each.nbytes for each in own) for at in starts):
                shared.discard(name)
        return engine

    train(config, world_size, engines=make_engines()._replace(open=open_engine))
    assert kept and all(torch.equal(after, before) for after, before in kept)  # the engine computes in this memory
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


def _partitioned(
    folder: Path, run: str, base: str, *overrides: str, ranks: tuple[int, int] = (2, 1), weights: str = "partition"
) -> tuple[list[str], float, int, list[tuple[int, int]]]:
    """The answers; of the second step the ratios and the bytes that rank 0 sent for its answers; of each rank the passes of its engine
    and the bytes that a pass sends.

    ``ranks``: their number, and that of nodes. Prompts that no step learns from are three, so one rank answers one more.
    """
    steps = "schedule={steps: 2, warmup_steps: 0}", "batch={sequences: 4, micro_sequences: 1}"
    held_out = "data.held_out=0.2", "evaluation={every: 1, sequences: 3}"
    start = f"model.start={base}" if base else "model.lora.rank=4"
    how = f"rollout.weights={weights}", *steps, *held_out, start
    config = make_prompt_config(folder, _REWARD, *how, *overrides, shape=_SIZES if base else _SMALL, run=run)
    opened: list[RolloutEngine] = []

    def open_engine(*given: Any) -> RolloutEngine:
        opened.append(RolloutEngine(*given))
        return opened[-1]

    train(config, *ranks, engines=make_engines()._replace(open=open_engine))
    found = [
        (
            own._rank.num_passes,
            sum((s.form.ranks.world_size - 1) * s.form.wire_bytes for each in own._rank.parts[1:] for s in each),
        )
        for own in opened
    ]
    rewards = [line["held_out_reward"] for line in log_lines(config) if "held_out_reward" in line]
    steps_of = [line for line in log_lines(config) if "mismatch" in line]
    answers = [*(Path(config.run) / SAMPLES).read_text().splitlines(), *map(str, rewards)]
    return answers, steps_of[1]["mismatch"], steps_of[1]["answer_wire_bytes"], found


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[int, int]], list[str]]:
    """The answers of ranks that have all layers, computed once; how the trainer holds and moves its own changes none."""

    def compute(dtype: str, ranks: tuple[int, int]) -> list[str]:
        given = "parallel.sharding=zero3", f"model.compute_dtype={dtype}"
        folder = tmp_path_factory.mktemp("resident")
        answers, _, sent, _ = _partitioned(folder, "run", "", *given, ranks=ranks, weights="resident")
        assert sent == 0
        return answers

    return cache(compute)


@pytest.mark.parametrize(
    ("how", "dtype", "ranks"),
    [
        ("parallel.sharding=zero3", "float32", (2, 1)),
        ("parallel.sharding=zero3", "bfloat16", (2, 1)),
        ("parallel={sharding: zero3, gather_path: flat}", "float32", (4, 2)),
        ("parallel={sharding: zero3, secondary: true}", "float32", (4, 2)),
        ("parallel.sharding=hybrid", "float32", (4, 2)),
        ("parallel.sharding=zero2", "float32", (2, 1)),
    ],
)
def test_gathered_layers_give_the_answers_of_resident_ones(
    how: str, dtype: str, ranks: tuple[int, int], tmp_path: Path, resident: Callable[[str, tuple[int, int]], list[str]]
) -> None:
    answers, _, sent, engines = _partitioned(tmp_path, "run", "", how, f"model.compute_dtype={dtype}", ranks=ranks)
    assert answers == resident(dtype, ranks)
    assert sent > 0
    assert len({passes for passes, _ in engines}) == 1
    assert all(pass_bytes > 0 for _, pass_bytes in engines)


def test_packed_blocks_are_gathered_as_they_are(tmp_path: Path) -> None:
    base = str(make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", others={"attn_v": "Q6_K"}, **_SIZES))
    packed = "parallel={sharding: zero3, frozen_codec: packed}"
    answers, mismatch, *_ = _partitioned(tmp_path, "gathered", base, packed)
    resident, *_ = _partitioned(tmp_path, "resident", base, packed, weights="resident")
    assert answers == resident
    assert mismatch < 1e-4


@pytest.mark.parametrize(("codec", "ranks"), [("int4", (2, 1)), ("int8", (4, 2))])
def test_the_engine_multiplies_with_the_trainers_rounded_numbers(
    tmp_path: Path, codec: str, ranks: tuple[int, int]
) -> None:
    rounded = f"parallel={{sharding: zero3, frozen_codec: {codec}}}"
    _, mismatch, *_ = _partitioned(tmp_path, "gathered", "", rounded, ranks=ranks)
    _, beside, *_ = _partitioned(tmp_path, "resident", "", rounded, ranks=ranks, weights="resident")
    assert mismatch < 1e-4 < beside


def test_an_answer_sends_the_parts_once_a_pass(tmp_path: Path) -> None:
    """And eight bytes to each other rank, to agree on each step."""
    answers, _, sent, engines = _partitioned(tmp_path, "run", "", "parallel.sharding=zero3", "evaluation.every=0")
    assert len(answers) == 16
    passes, pass_bytes = engines[0]
    assert passes == 16  # of two rollouts of eight tokens
    assert sent == 8 * pass_bytes + 9 * 8


def test_gathers_stay_inside_a_node_that_has_all_parts(tmp_path: Path) -> None:
    """What rank 0 sends to the other node while answering is nothing."""
    across: list[int] = []

    def open_engine(*given: Any) -> RolloutEngine:
        engine, nodes = RolloutEngine(*given), given[-1].groups.gather.nodes
        if given[-1].groups.main.rank == 0:
            own = engine.answer

            def answer(*asked: Any) -> list[Answer]:
                before, inside = nodes.across.bytes_sent, nodes.inside.bytes_sent
                answers = own(*asked)
                across.append(nodes.across.bytes_sent - before)
                assert nodes.inside.bytes_sent > inside
                return answers

            engine.answer = answer  # pyright: ignore[reportAttributeAccessIssue]
        return engine

    steps = "schedule={steps: 2, warmup_steps: 0}", "batch={sequences: 4, micro_sequences: 1}"
    how = *steps, "model.lora.rank=4", "parallel={sharding: zero3, secondary: true}", "rollout.weights=partition"
    config = make_prompt_config(tmp_path, _REWARD, *how, shape=_SMALL)
    train(config, 4, 2, engines=make_engines()._replace(open=open_engine))
    assert across == [0, 0]


@pytest.mark.parametrize(
    ("base", "how", "ranks"),
    [
        ("", ("parallel.sharding=zero3", "model.compute_dtype=bfloat16"), 1),
        ("", ("parallel={sharding: zero3, frozen_codec: int8}",), 1),
        ("", ("parallel.sharding=zero3", "rollout.tp=2"), 2),
        ("", ("parallel.sharding=zero3", "rollout.weights=partition"), 2),
        ("", ("parallel={sharding: zero3, frozen_codec: int8}", "rollout.weights=partition"), 2),
        ("gguf", ("parallel={sharding: zero3, frozen_codec: packed}",), 1),
        ("gguf", ("parallel={sharding: zero3, frozen_codec: packed}", "rollout.weights=partition"), 2),
        ("gguf", ("parallel={sharding: zero3, frozen_codec: none}",), 1),
    ],
    ids=str,
)
def test_what_the_engine_holds_equals_the_plan(tmp_path: Path, base: str, how: tuple[str, ...], ranks: int) -> None:
    start = "model.lora.rank=4"
    if base:
        start = f"model.start={make_tiny_gguf(tmp_path / 'base.gguf', 'Q4_K', others={'attn_v': 'Q6_K'}, **_SIZES)}"
    steps = "schedule={steps: 1, warmup_steps: 0}", "batch={sequences: 4, micro_sequences: 1}"
    config = make_prompt_config(tmp_path, _REWARD, start, *steps, *how, shape=_SIZES)
    held: list[dict[str, int]] = []

    def open_engine(*given: Any) -> RolloutEngine:
        engine = RolloutEngine(*given)
        if given[-1].groups.main.rank == 0:
            held.append(_held(engine, given[-1]))
        return engine

    train(config, ranks, engines=make_engines()._replace(open=open_engine))
    planned = engine_bytes(config, Topology(0, ranks))
    assert held == [{name: pytest.approx(size, abs=0.02 * size + 8192) for name, size in planned.items()}]


def _held(engine: RolloutEngine, trainer: Engine) -> dict[str, int]:
    """Bytes of an engine's tensors that are not the trainer's."""
    runner = engine._rank.runner
    weights, products = runner._model.weights, runner.adapters
    theirs = [shard.wire() for shard in trainer.frozen_shards.values()]
    found = [getattr(weights.outer, field) for field in ("embedding", "final_norm", "head")]
    if isinstance(weights, StreamedWeights):
        assert isinstance(weights.store, GatheredLayers)
        found += [weights.store._room, *(buffer.memory for buffer in weights.pool.buffers)]
    else:
        found += [getattr(weights.layer(n), name) for n in range(_LAYERS) for name in _IN_LAYER]
    parts = {
        part.data_ptr(): part.nbytes
        for each in found
        for part in (_tensors(each) if each is not None else [])
        if not any(0 <= part.data_ptr() - own.data_ptr() < own.nbytes for own in theirs)
    }
    assert products is not None
    cache = [tensor for n in range(_LAYERS) for tensor in runner.cache.layer(n)]
    sites = [tensor for site in products.sites.values() for tensor in (site.a_NX, site.b_NX)]
    return {
        "engine_weights": sum(parts.values()),
        "engine_cache": sum(tensor.nbytes for tensor in cache),
        "engine_adapters": sum(tensor.nbytes for tensor in sites),
    }


def _tensors(weight: Weight) -> list[Tensor]:
    parts = weight.parts if isinstance(weight, StackedMatrix) else [weight]
    return [part.blocks_OB if isinstance(part, PackedMatrix) else part for part in parts]


def test_a_prompt_longer_than_a_pass_is_gathered_for_by_all(tmp_path: Path) -> None:
    """Rank 0 has a prompt of two passes, rank 1 one that ends at once; the answers are those of resident layers."""
    found = []
    for weights in ("partition", "resident"):
        config = make_prompt_config(
            tmp_path,
            _REWARD,
            "model.lora.rank=4",
            "parallel.sharding=zero3",
            "data.sequence_tokens=2200",
            "batch={sequences: 2, micro_sequences: 1}",
            "schedule={steps: 1, warmup_steps: 0}",
            f"rollout.weights={weights}",
            shape={**_SMALL, "max_position_embeddings": 4096},
            run=weights,
        )
        answers: dict[int, list[list[int]]] = {}

        def open_engine(*given: Any, answers: dict[int, list[list[int]]] = answers) -> RolloutEngine:
            engine, rank = RolloutEngine(*given), given[-1].groups.main.rank
            engine.load({name: tensor.clone() for name, tensor in given[-1].full_tensors()})
            asked = [([7, 8, 9] * 700, 1)] if rank == 0 else [([7, 8, 9], 2)]
            answers[rank] = [own.token_ids for own in engine.answer(asked, 6 if rank == 0 else 1)]
            return engine

        train(config, 2, engines=make_engines()._replace(open=open_engine))
        found.append(answers)
    assert found[0] == found[1]
    assert [len(found[0][rank][0]) for rank in (0, 1)] == [6, 1]


def test_what_cannot_be_gathered_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks_per_bucket=2 keeps several together"):
        _partitioned(tmp_path, "buckets", "", "parallel={sharding: zero3, blocks_per_bucket: 2}")
    base = str(make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", others={"attn_k": "F16"}, **_SIZES))
    with pytest.raises(ValueError, match=r"q_proj.*k_proj.*v_proj.* in one form.*leave out rollout"):
        _partitioned(tmp_path, "mixed", base, "parallel={sharding: zero3, frozen_codec: packed}")
    with pytest.raises(ValueError, match="which tp splits"):
        _partitioned(tmp_path, "split", "", "rollout.tp=2", "parallel.sharding=zero3")
