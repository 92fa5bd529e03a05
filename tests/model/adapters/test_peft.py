"""PEFT folders: what is read from them, what is refused and with which words, and the answers of PEFT itself."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.lora import ALL_TARGETS, make_adapter
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from tightwire.model.adapters.peft import open_adapter
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LlamaConfig:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("tiny")))).config


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_scales_and_ranks_of_modules(config: LlamaConfig, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, config, rank=4, ranks={"v_proj": 2, "down_proj": 8}, alpha=6)
    # PEFT's patterns match whole names, also those that begin with ^.
    _edit(
        folder, alpha_pattern={"^model.layers.0": 7, "layers.1.self_attn.q_proj": 5, "^model.layers.1.mlp.up_proj": 3}
    )
    adapter = open_adapter(folder, config)
    assert adapter.rank == 8 and len(adapter.modules) == 7 * config.num_layers
    assert adapter.modules["model.layers.0.self_attn.q_proj"] == (4, 6 / 4)
    assert adapter.modules["model.layers.1.self_attn.q_proj"] == (4, 5 / 4)
    assert adapter.modules["model.layers.1.mlp.up_proj"] == (4, 3 / 4)
    assert adapter.modules["model.layers.1.mlp.down_proj"] == (8, 6 / 8)
    _edit(folder, use_rslora=True)
    assert open_adapter(folder, config).modules["model.layers.0.self_attn.v_proj"] == (2, 6 / math.sqrt(2))


def test_only_some_layers(config: LlamaConfig, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, config)
    _edit(folder, layers_to_transform=[1])
    _edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.0." in name])
    adapter = open_adapter(folder, config)
    assert adapter.has("model.layers.1.mlp.up_proj") and not adapter.has("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported: whole modules"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; supported: LORA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head', .* supported: q_proj, k_proj"),
        ({"target_modules": ["embed_tokens"]}, "target_modules has 'embed_tokens'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported: it changes"),
        ({"future_field": {"a": 1}}, "future_field=.* is not supported: this server does not know it"),
        ({"r": 5}, r"lora_A.weight has shape \(4, .*\); r and the model's configuration require \(5, "),
        ({"r": 0}, "r must be a whole number above 0, got 0"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number, got 'x'"),
        ({"lora_alpha": 10**400}, "a value has the wrong type or is invalid: int too large"),
        ({"rank_pattern": {"(": 3}}, "a value has the wrong type or is invalid"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, config: LlamaConfig, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, config)
    _edit(folder, **changes)
    with pytest.raises(ModelError, match=message):
        open_adapter(folder, config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            torch.zeros(4, 304),
            "lora_embedding_A is not supported",
        ),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64), "lm_head.lora_A.weight is not supported"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.zeros(64), "lora_magnitude"),
        (
            "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight",
            torch.zeros(4, 64),
            "layers.7.mlp.up_proj.lora_A.weight is not supported; supported: .* in 2 layers",
        ),
    ],
)
def test_tensors_that_are_refused(
    name: str, tensor: torch.Tensor, message: str, config: LlamaConfig, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, config)
    _edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(ModelError, match=message):
        open_adapter(folder, config)


def test_folders_that_are_incomplete_or_too_large(config: LlamaConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapter_config.json; give the folder"):
        open_adapter(tmp_path, config)
    folder = make_adapter(tmp_path, config)
    with pytest.raises(ModelError, match="its rank is 4, and there is room for 2; .* --max-lora-rank 4"):
        open_adapter(folder, config, max_rank=2)
    _edit_tensors(folder, lambda tensors: tensors.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"))
    with pytest.raises(ModelError, match="tensor .*layers.1.mlp.up_proj.lora_B.weight is missing"):
        open_adapter(folder, config)
    _edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "up_proj" in name])
    with pytest.raises(ModelError, match="target_modules has 'up_proj', but adapter_model.safetensors has no tensors"):
        open_adapter(folder, config)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")  # reading it would never end
    for missing in (folder, tmp_path / ("é" * 300)):
        with pytest.raises(ModelError, match="has no adapter_"):
            open_adapter(missing, config)


def test_the_targets_that_this_project_names_are_all(config: LlamaConfig, tmp_path: Path) -> None:
    adapter = open_adapter(make_adapter(tmp_path, config), config)
    assert {module.rpartition(".")[2] for module in adapter.modules} == set(ALL_TARGETS)
