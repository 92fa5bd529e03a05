"""An exported configuration reads back as the same, whatever it came from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import VARIANTS, tiny_config
from transformers import AutoConfig

from tightwire.model.checkpoint.config import LlamaConfig, config_from_hf
from tightwire.model.checkpoint.export import config_to_hf
from tightwire.model.checkpoint.random import RANDOM_SHAPES
from tightwire.model.open import open_checkpoint

CONFIGS = {name: config_from_hf(tiny_config(**keys)) for name, keys in VARIANTS.items()} | RANDOM_SHAPES


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_comes_back_the_same(name: str) -> None:
    exported = json.loads(json.dumps(config_to_hf(CONFIGS[name])))
    assert config_from_hf(exported) == CONFIGS[name]


def test_end_tokens_keep_their_order() -> None:
    config = replace(CONFIGS["plain"], eos_token_ids=(9, 3, 5), bos_token_id=7, dtype="float16")
    assert config_from_hf(config_to_hf(config)) == config


def test_of_a_gguf(tmp_path: Path) -> None:
    config = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", **VARIANTS["rope-linear"]))).config
    assert config.rope_scaling.kind == "linear"
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("name", ["plain", "rope-linear", "rope-llama3", "head-dim"])
def test_transformers_reads_the_same_sizes(tmp_path: Path, name: str) -> None:
    config: LlamaConfig = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.head_dim, theirs.num_key_value_heads) == (config.head_dim, config.num_kv_heads)
    assert config_from_hf(theirs.to_dict()) == config
