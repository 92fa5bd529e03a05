"""Each family of the table answers as transformers does, on one rank and split, from a folder and from a .gguf."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from harness import run_in_process
from helpers.model.family_models import make_family_folder, make_family_gguf
from helpers.model.quantized_folders import SCHEMES, quantize_folder
from helpers.model.rank_logits import PROMPT, rank_logits
from helpers.model.transformers_reference import greedy_with_logits
from safetensors.torch import save_file
from torch import Tensor

from tightwire.comm.group.group import in_process_groups
from tightwire.kernels.layer_ops import norm_linear
from tightwire.model import decoder, layer_kernels
from tightwire.model.checkpoint.hf_config import config_from_hf, config_to_hf
from tightwire.model.families import FAMILIES, family_named
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.runner import ModelRunner
from tightwire.model.step import Batch
from tightwire.model.weights import WeightPlan

_NUM_TOKENS = 6  # after the prompt
_FEW = (
    PROMPT + 2
)  # tokens, of which two are generated: where ranks and dtypes differ, each more repeats the same kernels
_every_family = pytest.mark.parametrize("family", [family.names.name for family in FAMILIES])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """The folder of each family's model, made once."""
    return cache(lambda family: make_family_folder(family_named(family), tmp_path_factory.mktemp("family")))


@pytest.fixture(scope="session")
def wide_folders(tmp_path_factory: pytest.TempPathFactory):
    """Models of eight query heads."""
    sizes = {"hidden_size": 128, "intermediate_size": 288, "num_attention_heads": 8}
    return cache(lambda family: make_family_folder(family_named(family), tmp_path_factory.mktemp("wide"), **sizes))


@cache
def _theirs(folder: Path) -> tuple[list[int], Tensor]:
    return greedy_with_logits(folder, PROMPT, _NUM_TOKENS)


def _assert_close(got: Tensor | None, want: Tensor) -> None:
    assert got is not None
    bound = 2e-5 * want.abs().max()
    assert (got - want).abs().max() < bound
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@_every_family
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_tokens_and_logits_of_transformers(family: str, num_ranks: int, folders) -> None:
    tokens, want = _theirs(folders(family))
    _assert_close(run_in_process(num_ranks, rank_logits, str(folders(family)), tokens[:-1])[0], want)


_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),  # its head stays another one
        ("Qwen3", {"rope_scaling": {**_YARN, "rope_theta": 10000.0}}),  # beside rope_parameters
        ("Qwen3", {"rope_parameters": _YARN, "original_max_position_embeddings": 64}),
        ("Gemma 3", {"rope_scaling": _YARN}),
        ("OLMo 3", {"rope_scaling": {"factor": 2.0}}),
        ("Gemma 3", {"rope_parameters": {_SLIDING: {"rope_type": "default", "rope_theta": 3e3}}}),
        ("OLMo 3", {"rope_parameters": {_FULL: {**_YARN, "rope_theta": 1e6}, _SLIDING: {"rope_theta": 1e4}}}),
        ("Gemma 3", {"attn_logit_softcapping": 2.0}),
        ("Phi-3", {"layer_types": [_FULL] * 6}),  # a window in all layers all the same
        ("Ministral 3", {"sliding_window": 20, "layer_types": [_FULL, _SLIDING] * 3}),
        ("Ministral 3", {"rope_parameters": None}),
        ("Mistral", {"sliding_window_pattern": 2}),
    ],
)
def test_a_config_edited_by_hand_is_read_as_transformers_reads_it(
    family: str, changes: dict[str, Any], folders, tmp_path: Path
) -> None:
    folder = Path(copytree(folders(family), tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    tokens, want = _theirs(folder)
    _assert_close(rank_logits(in_process_groups(1)[0], str(folder), tokens[:-1]), want)


@_every_family
@pytest.mark.parametrize("num_ranks", [4, 6, 7, 8])
def test_many_ranks_share_kv_heads(family: str, num_ranks: int, wide_folders) -> None:
    """Two KV heads of which each rank keeps one, and nine groups of MLP columns."""
    tokens, want = _theirs(wide_folders(family))
    got = run_in_process(num_ranks, rank_logits, str(wide_folders(family)), tokens[:_FEW])[0]
    _assert_close(got, want[:_FEW])


@_every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_16_bits_over_ranks_are_as_close_as_they_round(
    family: str, dtype: torch.dtype, num_ranks: int, folders
) -> None:
    tokens, want = _theirs(folders(family))
    want = want[:_FEW]
    got = run_in_process(num_ranks, rank_logits, str(folders(family)), tokens[:_FEW], dtype)[0]
    assert got is not None and (got - want).abs().max() < 16 * torch.finfo(dtype).eps * want.abs().max()


@_every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generated_rows_have_the_bits_of_prompt_rows_and_of_streamed_layers(
    family: str, dtype: torch.dtype, folders
) -> None:
    """In float32, as one kernel multiplies both; in 16 bits, where prompts may have another, as close as it rounds."""
    group, location = in_process_groups(1)[0], str(folders(family))
    tokens, want = _theirs(folders(family))
    by_program = rank_logits(group, location, tokens[:-1], dtype)
    plan = WeightPlan(source="stream", origin="host", streamed=(1, 2, 4, 5))
    streamed = rank_logits(group, location, tokens[:-1], dtype, weight_plan=plan)
    one_by_one = rank_logits(group, location, tokens[:-1], dtype, generated=False)
    assert by_program is not None and streamed is not None and one_by_one is not None
    assert torch.equal(by_program, streamed)
    if dtype == torch.float32:
        assert torch.equal(by_program, one_by_one)
    else:
        bound = 16 * torch.finfo(dtype).eps * want.abs().max()
        assert (by_program - want).abs().max() < bound and (one_by_one - want).abs().max() < bound


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("family", [*(each.names.name for each in FAMILIES), "Llama with biases"])
def test_norms_in_kernels_of_products(
    family: str, kv_dtype: torch.dtype, folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replayed step of one row on a GPU may compute them; keys with a bias are cached without it in 8 bits."""
    make_batch, num_calls, num_rotations = ModelRunner._batch, 0, 0

    def fusing(*given: Any) -> Batch:
        batch = make_batch(*given)
        return replace(batch, fuses=len(batch.token_ids_T) == 1)

    def product(*given: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_calls, num_rotations
        num_calls += 1
        num_rotations += given[4].rotation is not None
        return norm_linear(*given)

    if family.startswith("Llama with"):
        folder = make_family_folder(family_named("Llama"), tmp_path, mlp_bias=True, attention_bias=True)
    else:
        folder = folders(family)
    given = in_process_groups(1)[0], str(folder), list(range(3, 3 + PROMPT + _NUM_TOKENS))
    want = rank_logits(*given, kv_dtype=kv_dtype)
    monkeypatch.setattr(ModelRunner, "_batch", fusing)
    monkeypatch.setattr(decoder, "available", lambda: False)
    monkeypatch.setattr(layer_kernels, "norm_linear", product)
    got = rank_logits(*given, kv_dtype=kv_dtype)
    assert want is not None and got is not None
    # A code of a cache in 8 bits may be the next one.
    assert (got - want).norm() < (1e-5 if kv_dtype == torch.float32 else 1e-3) * want.norm()
    config = open_checkpoint(str(folder)).config
    num_products = {"before": 2 * config.num_layers, "both": 1, "after": 0}  # nothing is added before the first layer
    assert num_calls == _NUM_TOKENS * num_products[config.norms]
    rotates = config.qk_norm == "none" and kv_dtype == torch.float32
    assert num_rotations == rotates * (num_calls // 2 if config.norms == "before" else num_calls)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma 3", "OLMo 2"])
def test_a_cache_in_8_bits_on_any_number_of_ranks(family: str, folders) -> None:
    """A head's codes do not depend on the ranks; the bound is about twice what these tiny models need."""
    tokens, want = _theirs(folders(family))
    first, *others = (
        run_in_process(ranks, partial(rank_logits, kv_dtype=torch.int8), str(folders(family)), tokens[:-1])[0]
        for ranks in (1, 2, 3)
    )
    assert first is not None and (first - want).norm() < 0.02 * want.norm()
    for other in others:
        assert other is not None and (first - other).norm() < 0.02 * want.norm()
    one_by_one = rank_logits(
        in_process_groups(1)[0], str(folders(family)), tokens[:-1], generated=False, kv_dtype=torch.int8
    )
    assert one_by_one is not None and torch.equal(first, one_by_one)


# Files of these say llama and mistral3, and are read as the first families of that name.
@pytest.mark.parametrize(
    "family", [each.names.name for each in FAMILIES if each.names.name not in ("Ministral", "Ministral 3")]
)
def test_a_gguf_is_the_same_model(family: str, folders, tmp_path: Path) -> None:
    path = make_family_gguf(family_named(family), folders(family), tmp_path / "m.gguf")
    assert open_checkpoint(str(path)).config.family == family.removesuffix(" 4")  # a dense Granite 4 says granite
    tokens, want = _theirs(folders(family))
    _assert_close(rank_logits(in_process_groups(1)[0], str(path), tokens[:-1]), want)


@pytest.mark.parametrize("family", ["Qwen2", "Granite 4", "Phi-3", "Gemma 3"])
@pytest.mark.parametrize("scheme", ["gptq", "w8a8-int"])
def test_a_quantized_folder_is_the_model_of_its_numbers(family: str, scheme: str, tmp_path: Path) -> None:
    """Beside biases, and of matrices that files keep stacked or name otherwise; on ranks that cut heads and columns."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    quantized = make_family_folder(family_named(family), tmp_path / "quantized", **sizes)
    plain = Path(copytree(quantized, tmp_path / "plain"))
    numbers = quantize_folder(quantized, SCHEMES[scheme])
    save_file(
        {name: part.contiguous() for name, part in numbers.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    tokens, want = _theirs(plain)
    _assert_close(run_in_process(3, rank_logits, str(quantized), tokens[:_FEW])[0], want[:_FEW])


@_every_family
def test_a_prepared_folder_is_the_same_model(family: str, folders, tmp_path: Path) -> None:
    path = make_family_gguf(family_named(family), folders(family), tmp_path / "m.gguf")
    prepare(open_checkpoint(str(path)), tmp_path / "prepared", PrepareOptions(tp=2, dtype="float32"))
    tokens = list(range(3, 3 + PROMPT + _NUM_TOKENS))
    prepared, stored = (run_in_process(2, rank_logits, str(each), tokens)[0] for each in (tmp_path / "prepared", path))
    assert prepared is not None and stored is not None
    assert torch.equal(prepared, stored)


def test_the_docs_name_every_family() -> None:
    """In the table of models."""
    table, _, _ = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("\n\n- ")
    rows = [row for row in table.splitlines() if row.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows][1:] == [each.names.name for each in FAMILIES]


@_every_family
def test_configurations_round_trip(family: str, folders) -> None:
    config = open_checkpoint(str(folders(family))).config
    assert config.family == family
    assert config_from_hf(config_to_hf(config)) == config
