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


def test_rows_of_the_head_have_no_gaps(tmp_path: Path) -> None:
    """Where only the last tokens of each sample have logits; torch would make a product a sample."""
    folder = make_family_folder(family_named("Llama"), tmp_path, num_hidden_layers=2)
    model = build_model(open_checkpoint(str(folder)).config, device=torch.device("meta"))
    given: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    model(input_ids=torch.zeros(3, 8, dtype=torch.int64, device="meta"), logits_to_keep=5)
    assert [(tuple(rows.shape[:2]), rows.is_contiguous()) for rows in given] == [((3, 5), True)]
