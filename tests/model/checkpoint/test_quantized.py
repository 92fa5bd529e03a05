"""Quantized safetensors: each format against its own formula in numpy, whole, in slices, and as packed blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.quantized_folders import SCHEMES, make_quantized
from safetensors.torch import load_file, save_file

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference
from tightwire.model.checkpoint import quantized
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import CheckpointReader
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
    assert ("act-order" in checkpoint.note) == ("act-order" in scheme)
    assert kept_as.name in checkpoint.note


@pytest.mark.parametrize("scheme", ["awq", "gptq", "gptq-act-order", "w4a16-asymmetric"])
def test_codes_are_unpacked_piece_by_piece(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a whole matrix would take several times the memory of a streamed layer."""
    name, sizes, unpack = NAMES[2], list[int](), quantized._unpack
    numbers = make_quantized(tmp_path, SCHEMES[scheme])[name][5:117]
    monkeypatch.setattr(
        quantized, "_unpack", lambda *given: (sizes.append((parts := unpack(*given)).numel()), parts)[1]
    )
    monkeypatch.setattr("tightwire.model.checkpoint.reader.CHUNK_BYTES", 4 * 192 * 16)  # sixteen rows
    out = torch.empty(112, 192)
    open_checkpoint(str(tmp_path)).reader().read_into(out, name, rows=range(5, 117))
    assert torch.equal(out, numbers)
    assert len(sizes) >= 7
    assert max(sizes) <= 3 * 8 * 192  # of rows that begin and end within an int32
    assert scheme == "w4a16-asymmetric" or min(sizes) <= 3 * 8 * 3  # zeros of these rows alone


def test_indices_of_neighbouring_columns_change_nothing(tmp_path: Path) -> None:
    """GPTQ's files always have them, and compressed-tensors' may have unused ones."""
    want = make_quantized(tmp_path, SCHEMES["gptq"])
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.reader().stored_as(NAMES[2]) == "Q4_0" and "act-order" not in checkpoint.note
    reader = change_folder(tmp_path / "unused", "gptq", {"g_idx": _UNUSED})
    out = torch.empty(128, 192)
    reader.read_into(out, NAMES[2], rows=range(128))
    assert torch.equal(out, want[NAMES[2]]) and reader.stored_as(NAMES[2]) == "Q4_0"


def test_groups_that_are_not_whole_32s_in_a_row_are_expanded(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["w8a8-int"], intermediate_size=200)
    reader = open_checkpoint(str(tmp_path)).reader()
    assert reader.stored_as(NAMES[0]) == "Q8_0"
    assert reader.stored_as(NAMES[2]) == "8 bits, rows"


def test_one_scale_and_zero_of_a_whole_tensor(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    tensors = {"weight_scale": torch.tensor([0.5]), "weight_zero_point": torch.tensor([3], dtype=torch.int8)}
    reader = change_folder(tmp_path, "w8a8-int", tensors, config_groups={"group_0": {"weights": weights}})
    codes = load_file(tmp_path / "model.safetensors")[NAMES[2]]
    out = torch.empty(9, 192)
    reader.read_into(out, NAMES[2], rows=range(5, 14))
    assert torch.equal(out, (codes[5:14].float() - 3) * 0.5)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    out = torch.empty(128, 192)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.scales is missing"):
        open_checkpoint(str(tmp_path)).reader().read_into(out, NAMES[2], rows=range(128))


def change_folder(folder: Path, scheme: str, tensors: dict[str, torch.Tensor], **stated: Any) -> CheckpointReader:
    """The reader of a tiny model in ``scheme``, of which tensors and keys of quantization_config are replaced."""
    make_quantized(folder, SCHEMES[scheme])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= stated
    (folder / "config.json").write_text(json.dumps(config))
    module = NAMES[2].removesuffix("weight")
    changed = {module + ending: tensor for ending, tensor in tensors.items()}
    save_file(load_file(folder / "model.safetensors") | changed, folder / "model.safetensors")
    return open_checkpoint(str(folder)).reader()


_UNUSED = torch.full((192,), -1, dtype=torch.int32)  # as compressed-tensors fills indices that do not apply
_GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 96}}}


@pytest.mark.parametrize(
    ("scheme", "tensors", "stated", "message"),
    [
        ("awq", {}, {"group_size": 96}, "3 scales and 3 zeros a row, and awq: 4 bits, groups of 96 need 2"),
        ("gptq", {"g_idx": _UNUSED}, {"group_size": 32}, "3 zeros a row, and gptq: 4 bits, groups of 32 need 6"),
        ("w4a16", {}, {"config_groups": _GROUPS}, "3 scales and 3 zeros a row"),
        ("fp8-blocks", {}, {"weight_block_size": [32, 32]}, "3 scales and 3 zeros a row"),
        ("fp8-blocks", {}, {"weight_block_size": [16, 64]}, "do not belong together"),
        ("awq", {"qzeros": torch.zeros(2, 16, dtype=torch.int32)}, {}, "3 scales and 2 zeros a row"),
        ("gptq", {"scales": torch.ones(3, 64, dtype=torch.float16)}, {}, "3 scales and 3 zeros a row"),
        ("gptq-act-order", {"g_idx": torch.full((192,), 3, dtype=torch.int32)}, {}, "need 4 each"),
        ("gptq-act-order", {"g_idx": (torch.arange(191) // 64).int()}, {}, "do not belong together"),
        ("gptq", {}, {"checkpoint_format": "gptq_v2"}, "its zeros are not those of"),
        ("w8a8-int", {"weight_scale": torch.full((128, 1), torch.nan)}, {}, "infinite or no numbers"),
        ("awq", {"scales": torch.full((3, 128), torch.inf)}, {}, "infinite or no numbers"),
        (
            "w8a8-int",
            {"weight": torch.ones(128, 192).half()},
            {},
            "a scale, and numbers in torch.float16; supported: int8",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    scheme: str, tensors: dict[str, torch.Tensor], stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reader = change_folder(tmp_path, scheme, tensors, **stated)
    kept_as = PACKED_FORMATS[SCHEMES[scheme].kept_as]
    packed = PackedMatrix(torch.empty(128, kept_as.row_bytes(192), dtype=torch.uint8), kept_as)
    for out in (torch.empty(128, 192), packed):
        with pytest.raises(ModelError, match=message) as caught:
            reader.read_into(out, NAMES[2], rows=range(128))
        assert NAMES[2].removesuffix(".weight") in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "tensors", "message"),
    [
        ("awq", {"qweight": torch.zeros(7, dtype=torch.int32)}, "unexpected shape"),
        ("gptq", {"qweight": torch.zeros(8, 128, dtype=torch.int32)}, "has shape"),
        ("w4a16", {"weight_shape": torch.tensor([128])}, "unexpected shape"),
        ("w4a16", {"weight_packed": torch.zeros(1, 1, 1, dtype=torch.int32)}, "unexpected shape"),
    ],
)
def test_codes_of_other_shapes_are_refused(
    scheme: str, tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        change_folder(tmp_path, scheme, tensors)


def test_scales_too_large_for_float16_are_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, SCHEMES["w4a16"])
    tensors = load_file(tmp_path / "model.safetensors")
    module = NAMES[2].removesuffix(".weight")
    tensors[f"{module}.weight_scale"] = torch.full((128, 3), 1e6)
    save_file(tensors, tmp_path / "model.safetensors")
    out = PackedMatrix(torch.empty(128, 18 * 6, dtype=torch.uint8), PACKED_FORMATS["Q4_0"])
    with pytest.raises(ModelError, match=rf"{module}\.weight: its scales are too large"):
        open_checkpoint(str(tmp_path)).reader().read_into(out, NAMES[2], rows=range(128))
