"""Runs that train an adapter: what they write, resume and refuse."""

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.quantized_folders import SCHEMES, make_quantized
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.model.transformers_reference import greedy
from helpers.server.local_engine import continue_prompts, local_engine
from helpers.training.training_runs import StopAfter, log_lines, losses, make_config, train
from tiny import VARIANTS, make_tiny
from transformers import LlamaForCausalLM

from tightwire.comm.group.topology import Topology
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.model.adapters.peft import open_adapter
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.open import open_checkpoint
from tightwire.training.checkpoint.folders import OtherRunError
from tightwire.training.config.read import ConfigError
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.options import engine_options
from tightwire.training.estimate.step import model_step
from tightwire.training.start.model import plan_model

_PROMPTS = [[5], [72, 101, 108, 108, 111], [200, 3, 17] * 11]
_LORA = "lora: {rank: 4, alpha: 64, dropout: 0.1}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base") / "model", **VARIANTS["odd-heads"])


def _config(folder: Path, base: Path, *overrides: str, run: str = "run") -> TrainConfig:
    model = f"model={{start: {base}, {_LORA}}}"
    return make_config(folder, model, "export.dtype=float32", "optimizer.lr=2e-2", *overrides, run=run)


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[float]:
    """Of one rank, without dropout."""
    config = _config(tmp_path_factory.mktemp("alone"), base, "model.lora.dropout=0")
    train(config)
    return losses(config)


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed (pip install peft)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_adapter_gives_the_same_greedy_text_in_peft_and_when_served(tmp_path: Path, base: Path) -> None:
    from peft import PeftModel

    config, before = _config(tmp_path, base, "parallel.sharding=zero3"), _digest(base)
    train(config, 2)

    adapter, checkpoint = Path(config.run) / "adapter", open_checkpoint(str(base))
    assert open_adapter(adapter, checkpoint.config).rank == 4
    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = [greedy(model.eval(), prompt, 16) for prompt in _PROMPTS]
    theirs: Any = PeftModel.from_pretrained(model, adapter).eval()
    wanted = [greedy(theirs, prompt, 16) for prompt in _PROMPTS]
    assert wanted != plain
    with local_engine(checkpoint, tp=2, max_model_len=256, adapters=[adapter]) as local:
        assert continue_prompts(local.engine, _PROMPTS, [1] * len(_PROMPTS), max_tokens=16) == wanted
    assert _digest(base) == before


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "overrides"),
    [
        (2, 1, ("parallel.sharding=zero2",)),
        (4, 2, ("parallel={sharding: zero3, secondary: true}",)),
        (4, 2, ("parallel.sharding=hybrid", "parallel.checkpoint_blocks=all")),
        (8, 2, ("parallel.sharding=zero3", "batch.micro_sequences=1")),
    ],
    ids=str,
)
def test_every_sharding_trains_the_same_adapter(
    tmp_path: Path,
    base: Path,
    losses_alone: list[float],
    world_size: int,
    num_nodes: int,
    overrides: tuple[str, ...],
) -> None:
    config = _config(tmp_path, base, "model.lora.dropout=0", *overrides)
    train(config, world_size, num_nodes)

    assert losses(config) == pytest.approx(losses_alone, abs=1e-4)


@pytest.mark.parametrize(
    "parallel",
    [
        "{sharding: zero3, gather_codec: int8, reduce_path: hierarchical, reduce_codec: int4, reduce_across_codec: int8}",
        "{sharding: hybrid, between: {kind: top-k, sparsity: [0.5], dense_below: 64}}",
    ],
)
def test_an_adapter_learns_through_codecs_and_compressors(
    tmp_path: Path, base: Path, losses_alone: list[float], parallel: str
) -> None:
    config = _config(tmp_path, base, "model.lora.dropout=0", f"parallel={parallel}")
    train(config, 4, 2)

    found = losses(config)
    assert found[0] == pytest.approx(losses_alone[0], abs=0.02)
    assert found[-1] < found[0] - (losses_alone[0] - losses_alone[-1]) / 2


def test_a_stopped_run_resumes_to_the_bit_with_dropout(tmp_path: Path, base: Path) -> None:
    whole, parted = _config(tmp_path, base, run="whole"), _config(tmp_path, base, run="parted")
    train(whole)
    train(parted, stop_signal=StopAfter(parted, 3))
    assert len(losses(parted)) == 3
    train(parted)

    assert losses(parted) == losses(whole)
    folders = [Path(config.run) / "adapter" for config in (whole, parted)]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in folders}) == 1


def test_a_gguf_that_keeps_its_own_blocks_is_trained_to_the_bit_as_its_numbers(tmp_path: Path) -> None:
    """Blocks of three formats beside a matrix of plain numbers, on one rank, four, and four that keep a copy on each node."""
    sizes: Any = {"hidden_size": 256, "intermediate_size": 1280, "head_dim": 64, "num_hidden_layers": 3}
    others = {"attn_v": "Q6_K", "attn_q": "Q8_0", "attn_k": "F16"}
    base = make_tiny_gguf(tmp_path / "base.gguf", "Q4_K", others=others, **sizes)
    stored = {name: tensor for name, tensor in GgufFile(base).tensors.items() if len(tensor.shape) == 2}
    block_bytes = sum(
        tensor.shape[0] * PACKED_FORMATS[tensor.kind.name].row_bytes(tensor.shape[1])
        for name, tensor in stored.items()
        if name.startswith("blk.0.") and "attn_k" not in name
    )

    def trained(run: str, codec: str, world_size: int = 1, num_nodes: int = 1, secondary: bool = False) -> TrainConfig:
        parallel = f"parallel={{sharding: zero3, frozen_codec: {codec}, secondary: {str(secondary).lower()}}}"
        config = _config(tmp_path, base, parallel, "schedule.steps=3", "model.lora.dropout=0", run=run)
        train(config, world_size, num_nodes)
        return config

    packed = trained("packed", "packed")
    assert losses(packed) == losses(trained("numbers", "none"))
    llama = open_checkpoint(str(base)).config
    _, plan = plan_model(packed, llama, torch.device("cpu"), 1)
    (blocks,) = [own.blocks for own in plan.flat_params if own.name == "blocks.0.packed"]
    assert blocks is not None and 0 <= blocks.num_elems - block_bytes < 512  # padding only
    for secondary in (False, True):
        runs = [trained(f"{codec}-{secondary}", codec, 4, 2, secondary) for codec in ("packed", "none")]
        assert losses(runs[0]) == losses(runs[1])
        for config in runs:
            step = model_step(config, engine_options(config), llama, Topology(0, 4, num_nodes=2))
            assert log_lines(config)[1]["wire_bytes"] == step.bytes_sent


@pytest.mark.parametrize("name", ["awq", "gptq", "w8a16"])
def test_another_projects_quantized_folder_keeps_its_blocks_too(tmp_path: Path, name: str) -> None:
    make_quantized(tmp_path / "model", SCHEMES[name])
    found = []
    for codec, num_ranks in (("packed", 1), ("none", 1), ("packed", 2)):
        own = f"parallel={{sharding: zero3, frozen_codec: {codec}}}", "schedule.steps=3", "model.lora.dropout=0"
        config = _config(tmp_path, tmp_path / "model", *own, run=f"{codec}-{num_ranks}")
        train(config, num_ranks)
        found.append(losses(config))
    packed, numbers, of_two = found
    assert packed == pytest.approx(numbers, abs=1e-2 if name == "awq" else 0)  # its minima become float16
    assert of_two == pytest.approx(packed, abs=1e-5)


def test_blocks_are_kept_only_of_a_quantized_gguf(tmp_path: Path, base: Path) -> None:
    with pytest.raises(
        ValueError, match=r"frozen_codec: packed keeps the blocks of frozen matrices of a quantized GGUF"
    ):
        train(_config(tmp_path, base, "parallel.frozen_codec=packed"))


def test_an_adapter_names_a_local_base_from_any_folder(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    train(_config(tmp_path, Path(base.name), "schedule.steps=1", "schedule.warmup_steps=0"))
    written = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)


def test_another_adapter_on_resume_is_refused(tmp_path: Path, base: Path) -> None:
    train(_config(tmp_path, base, "schedule.steps=2"))
    with pytest.raises(OtherRunError, match=r"lora is \{'rank': 4, .* in the checkpoint and \{'rank': 8"):
        train(_config(tmp_path, base, "model.lora.rank=8"))


def test_a_folder_that_is_no_adapter_is_not_replaced(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ValueError, match="export.folder: .* has the model .*, which this run reads"):
        train(_config(tmp_path, base, f"export.folder={base}"))
    shutil.copytree(base, tmp_path / "other")
    with pytest.raises(ValueError, match="has no adapter_config.json, so it is no earlier export"):
        train(_config(tmp_path, base, f"export.folder={tmp_path}/other"))


@pytest.mark.parametrize("override", ["model.frozen=[lm_head]", "model.shape={hidden_size: 32}"])
def test_lora_with_other_frozen_weights_or_a_new_model_is_refused(tmp_path: Path, base: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        _config(tmp_path, base, override)
