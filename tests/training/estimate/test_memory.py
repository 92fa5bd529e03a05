"""The most that a rank has at once, by formula and in real steps: every tensor of the thread that computes, exactly.

What lanes receive and sum is theirs (as threads, ranks do not even copy it): ``bench train`` measures whole processes.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import run_groups
from helpers.training.training_runs import make_config

from tightwire.comm.group.topology import Topology
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.sequences import Batch
from tightwire.training.engine.options import engine_options
from tightwire.training.estimate.memory import LiveBytes, RankMemory, rank_memory
from tightwire.training.ranks.groups import TrainGroups
from tightwire.training.run.setup import make_trained
from tightwire.training.start.model import config_of, open_starting_model, plan_model

_SIZES = (
    "model.shape={hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, intermediate_size: 160, vocab_size: 2048}",
    "model.shape.num_key_value_heads=2",
    "data.sequence_tokens=64",
    "batch={sequences: 8, micro_sequences: 2}",
)
_CASES = {
    **{name: (f"parallel.sharding={name}",) for name in ("none", "zero1", "zero2", "zero3", "hybrid")},
    **{
        f"{name}-checkpointed": (
            f"parallel.sharding={name}",
            "parallel.checkpoint_blocks=all",
            "data.sequence_tokens=96",  # so that backward takes more than the optimizer's step
        )
        for name in ("none", "zero3")
    },
    "two-checkpointed": ("parallel.sharding=zero3", "parallel.checkpoint_blocks=2"),
    "zero++": (
        "parallel={sharding: zero3, gather_codec: int8, secondary: true}",
        "parallel.reduce_path=hierarchical",
        "parallel.reduce_codec=int4",
        "parallel.reduce_across_codec=int4",
    ),
    "bfloat16": ("parallel.sharding=zero3", "model.compute_dtype=bfloat16", "parallel.reduce_dtype=bfloat16"),
    "top-k": ("parallel={sharding: hybrid, between: {kind: top-k}}",),
    "frozen": ("parallel.sharding=zero3", "model.frozen=[model.layers.0.*, model.embed_tokens.weight]"),
    "frozen-int4": ("parallel={sharding: zero3, frozen_codec: int4, secondary: true}", "model.frozen=['*proj*']"),
    # Then the optimizer's step takes most.
    "few-tokens": ("parallel.sharding=none", "data.sequence_tokens=2", "model.frozen=[model.embed_tokens.weight]"),
}
_MOST_ERROR = 0.01  # numbers by themselves, and buffers that begin with a page


def _formula(config: TrainConfig) -> RankMemory:
    options, llama, topology = engine_options(config), config_of(config.model), Topology(0, 4, num_nodes=2)
    _, plan = plan_model(config, llama, torch.device("meta"), options.sharding.shard_ranks(4, 2))
    return rank_memory(config, options, llama, plan, topology)


def _step(groups: TrainGroups, config: TrainConfig) -> int:
    """The most bytes of tensors in two steps, from before the model was made."""
    start = open_starting_model(config.model, seed=0, keep_in=Path(), texts=lambda: ())
    with LiveBytes() as live:
        trained = make_trained(config, engine_options(config), start, groups)
        for _ in range(2):
            size = config.batch.micro_sequences, config.step_tokens // config.batch.sequences
            ids_BS = torch.zeros(size, dtype=torch.int64)
            # Two samples a row, as chats and preferences are packed.
            positions_BS = None if config.data.kind == "text" else (torch.arange(size[1]) % 32).repeat(size[0], 1)
            with trained.engine.micro_batch(last=True):
                trained.objective.loss(trained.model, Batch(ids_BS, ids_BS, positions_BS))[0].backward()
            trained.engine.finish_gradients()
            trained.state.optimizer.step()
            trained.engine.weights_changed()
        trained.engine.close()
    return live.most


def _assert_backward_has_the_peak(config: TrainConfig) -> None:
    memory = _formula(config)
    expected = RankMemory(memory.stays, {"backward": memory.peaks["backward"]}).most
    peaks = run_groups(in_process_train_groups(4, num_nodes=2), _step, config)
    assert peaks == [pytest.approx(expected, rel=_MOST_ERROR)] * 4


@pytest.mark.parametrize("case", _CASES)
def test_the_peak_memory_of_a_rank_equals_the_formula(case: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, *_SIZES, *_CASES[case])
    memory = _formula(config)
    own = {name: size for name, size in memory.peaks.items() if name in ("backward", "optimizer_step")}
    expected = RankMemory(memory.stays, own).most

    peaks = run_groups(in_process_train_groups(4, num_nodes=2), _step, config)

    assert peaks == [pytest.approx(expected, rel=_MOST_ERROR)] * 4
    assert max(own, key=lambda name: own[name]) == ("optimizer_step" if case == "few-tokens" else "backward")


@pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        ("{sharding: zero3, frozen_codec: int8}", "text"),
        ("{sharding: none}", "text"),
        ("{sharding: zero3, frozen_codec: int4, secondary: true, checkpoint_blocks: 3}", "text"),
        ("{sharding: zero3, frozen_codec: int8}", "preferences"),
        ("{sharding: none}", "chat"),
    ],
)
def test_the_peak_memory_of_training_an_adapter_equals_the_formula(parallel: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160}
    sizes |= {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2048, **sizes}))
    model = f"model={{start: 'random:{tmp_path}/config.json', lora: {{rank: 8}}}}"
    config = make_config(tmp_path, *_SIZES[2:], model, f"parallel={parallel}", f"data.kind={kind}")
    _assert_backward_has_the_peak(config)


def test_the_peak_memory_beside_packed_blocks_equals_the_formula(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 3}
    base = make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", **sizes)
    packed = "parallel={sharding: zero3, frozen_codec: packed, secondary: true}"
    config = make_config(tmp_path, *_SIZES[2:], f"model={{start: {base}, lora: {{rank: 8}}}}", packed)
    _assert_backward_has_the_peak(config)


def test_checkpointing_needs_less_memory(tmp_path: Path) -> None:
    shapes = (*_SIZES, "model.shape.vocab_size=300", "model.shape.num_hidden_layers=8")
    none, half, every = (
        _formula(make_config(tmp_path, *shapes, f"parallel.checkpoint_blocks={count}")).peaks["backward"]
        for count in ("0", "4", "all")
    )
    assert every < half < none
    assert every < none / 2


def test_live_bytes_count_referenced_tensors() -> None:
    before = torch.empty(1000)
    with LiveBytes() as live:
        first = before + 1
        second = first.view(10, 100).t() * 2
        assert (live.now, live.most) == (8000, 8000)
        del first
        second.add_(1)
        assert (live.now, live.most) == (4000, 8000)
        live.most = live.now
        torch.empty(10)
        assert (live.now, live.most) == (4000, 4040)


def test_live_bytes_count_tensors_in_lists() -> None:
    before = torch.zeros(2, 500)
    with LiveBytes() as live:
        made: Any = torch.unbind_copy(torch.ones(2, 255))
        views = before.unbind()
        assert (live.now, len(made), len(views)) == (2040, 2, 2)


def test_live_bytes_count_one_thread() -> None:
    made: list[Any] = []
    with LiveBytes() as live:
        other = threading.Thread(target=lambda: made.append(torch.ones(50)))
        other.start()
        other.join()
        assert live.most == 0
