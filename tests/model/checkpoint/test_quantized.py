"""Quantized safetensors: each format against its own formula in numpy, whole, in slices, and as packed blocks."""

from pathlib import Path

import pytest
import torch
from helpers.model.quantized_folders import SCHEMES, make_quantized
from safetensors.torch import load_file, save_file

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint

NAMES = [f"model.layers.1.{part}.weight" for part in ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")]


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_numbers_are_those_of_the_formats_own_formula(scheme: str, tmp_path: Path) -> None:
    want = make_quantized(tmp_path, SCHEMES[scheme])
    reader = open_checkpoint(str(tmp_path)).reader()
    for name, numbers in want.items():
        assert reader.shape(name) == tuple(numbers.shape)
        out = torch.empty(numbers.shape)
        reader.read_into(out, name, rows=range(len(out)))
        assert torch.equal(out, numbers), name
    for rows, columns in ((range(3, 29), range(64, 128)), (range(31, 32), range(32, 96))):
        part = torch.empty(len(rows), len(columns))
        reader.read_into(part, NAMES[2], rows=rows, columns=columns)
        assert torch.equal(part, want[NAMES[2]][rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_packed_blocks_hold_the_same_numbers_within_the_stated_cost(scheme: str, tmp_path: Path) -> None:
    want = make_quantized(tmp_path, SCHEMES[scheme])
    checkpoint = open_checkpoint(str(tmp_path))
    reader, kept_as = checkpoint.reader(), PACKED_FORMATS[SCHEMES[scheme].kept_as]
    for name in NAMES:
        assert reader.stored_as(name) == kept_as.name
        columns = range(32, 96)
        out = PackedMatrix(torch.empty(20, kept_as.row_bytes(64), dtype=torch.uint8), kept_as)
        reader.read_into(out, name, rows=range(5, 25), columns=columns)
        numbers = want[name][5:25, 32:96]
        error = (dequantize_reference(out, torch.float32) - numbers).abs().unflatten(1, (-1, 32))
        reach = numbers.abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True)
        if SCHEMES[scheme].is_rounded_again:
            # Half a step of the largest number / 127; the scale is rounded up by at most 2 ** -10 of itself.
            assert (error <= reach / 254 * (1 + 2**-9)).all()
        elif kept_as.has_minimum:
            assert (error <= reach * 2**-10).all()  # the minimum is at most 15 steps, and rounded to 11 bits
            assert error.max() > 0
        else:
            assert torch.equal(error, torch.zeros_like(error))
    assert ("rounded again" in checkpoint.note) == SCHEMES[scheme].is_rounded_again
    assert kept_as.name in checkpoint.note


def test_groups_that_are_not_whole_32s_in_a_row_are_expanded(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["w8a8-int"], intermediate_size=200)
    reader = open_checkpoint(str(tmp_path)).reader()
    assert reader.stored_as(NAMES[0]) == "Q8_0"
    assert reader.stored_as(NAMES[2]) == "8 bits, rows"


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    out = torch.empty(128, 192)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.scales is missing"):
        open_checkpoint(str(tmp_path)).reader().read_into(out, NAMES[2], rows=range(128))


def test_scales_too_large_for_float16_are_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["w4a16"])
    tensors = load_file(tmp_path / "model.safetensors")
    module = NAMES[2].removesuffix(".weight")
    tensors[f"{module}.weight_scale"] = torch.full((128, 3), 1e6)
    save_file(tensors, tmp_path / "model.safetensors")
    out = PackedMatrix(torch.empty(128, 18 * 6, dtype=torch.uint8), PACKED_FORMATS["Q4_0"])
    with pytest.raises(ModelError, match=rf"{module}\.weight: its scales are too large"):
        open_checkpoint(str(tmp_path)).reader().read_into(out, NAMES[2], rows=range(128))
