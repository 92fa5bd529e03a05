"""The tiny model is what it claims: small, the same every time, and a model to transformers too."""

from pathlib import Path

import pytest
import torch
from tiny import VARIANTS, make_tiny, tiny_config, tiny_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_transformers_loads_it(tmp_path: Path, variant: str, sharded: bool) -> None:
    folder = make_tiny(tmp_path / "m", sharded=sharded, **VARIANTS[variant])
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    for name, tensor in tiny_tensors(tiny_config(**VARIANTS[variant])).items():
        assert torch.equal(state[name], tensor), name


def test_is_small_and_seeded(tmp_path: Path) -> None:
    first, second, other = (make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert sum(path.stat().st_size for path in first.iterdir()) < 1_000_000
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m"))
    assert tokenizer("hé")["input_ids"] == [*"hé".encode()]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|bos|><|start|>user\nx<|end|>"
