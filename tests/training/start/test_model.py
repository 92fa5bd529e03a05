"""A training run starts from a model of any family: the modules, names and numbers of transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.family_models import make_family_folder
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tightwire.model.families import FAMILIES, family_named
from tightwire.model.open import open_checkpoint
from tightwire.training.start.model import StartingModel, build_model


@pytest.mark.parametrize("family", [family.names.name for family in FAMILIES])
def test_logits_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_family_folder(family_named(family), tmp_path, num_hidden_layers=2, layer_types=None)
    checkpoint = open_checkpoint(str(folder))
    given: Any = {
        "name": checkpoint.name,
        "config": checkpoint.config,
        "reader": checkpoint.reader(),
        "tokenizer": None,
    }
    start = StartingModel(**given)
    model = build_model(start.config, device=torch.device("cpu"))
    assert all(buffer.is_meta for _, buffer in build_model(start.config, device=torch.device("meta")).named_buffers())
    stored = load_file(folder / "model.safetensors")

    for name, _ in list(model.named_parameters()):
        module, _, field = name.rpartition(".")
        weights = start.read(name)
        assert torch.equal(weights, stored[name])
        setattr(model.get_submodule(module), field, torch.nn.Parameter(weights))
    model.tie_weights()

    tokens = torch.arange(3, 48)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits)
