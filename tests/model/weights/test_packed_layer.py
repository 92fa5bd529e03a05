"""Packed layers: every tensor at its place, encoded and decoded, with the bits of separate tensors."""

from pathlib import Path

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import VARIANTS, make_tiny

from tightwire.comm.buffers import page_aligned
from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.fused import layer_tensors, read_tensors
from tightwire.model.weights.load import load_resident
from tightwire.model.weights.packed_layer import PackedLayer, pack_tensors

CPU = torch.device("cpu")


def packed_of(
    checkpoint: Checkpoint, quantization: str, codec: str, rank: int, tp: int
) -> tuple[PackedLayer, PackedLayer, torch.Tensor]:
    """Layer 1 packed plain and encoded, and a buffer that holds the plain one."""
    config = checkpoint.config
    shard = make_layout(config, tp).shards[rank]
    formats = choose_formats(checkpoint.reader(), config, quantization)
    tensors = layer_tensors(config, shard, 1)
    plain = pack_tensors(tensors, formats, torch.bfloat16)
    buffer = page_aligned(plain.num_bytes, CPU).fill_(99)
    read_tensors(checkpoint.reader(), tensors, plain.tensors(buffer))
    return plain, pack_tensors(tensors, formats, torch.bfloat16, parse_codec(WEIGHT_CODECS[codec])), buffer


def bits(matrix: Matrix) -> torch.Tensor:
    return (matrix.blocks_OB if isinstance(matrix, PackedMatrix) else matrix).contiguous().view(torch.uint8)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("source", [*sorted(VARIANTS), "Q8_0", "Q4_1", "int8", "int4"])
def test_a_packed_layer_has_the_tensors_of_resident_weights(source: str, tp: int, tmp_path: Path) -> None:
    if source in ("Q8_0", "Q4_1"):
        checkpoint, quantization = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", quant=source))), "auto"
    else:
        overrides = VARIANTS.get(source, {})
        checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", **overrides)))
        quantization = source if source.startswith("int") else "auto"
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, quantization)
    if formats.packed and tp == 3:
        pytest.skip("three ranks would cut groups of 32, which check_split refuses")
    for rank in range(tp):
        plain, _, buffer = packed_of(checkpoint, quantization, "none", rank, tp)
        shard = make_layout(config, tp).shards[rank]
        resident = load_resident(
            checkpoint.reader(), config, shard, dtype=torch.bfloat16, device=CPU, formats=formats
        ).layer(1)
        for field, matrix in plain.tensors(buffer).items():
            own = getattr(resident, field)
            assert matrix.shape == own.shape
            assert torch.equal(bits(matrix), bits(own)), field
        assert plain.num_bytes % 4096 == 0
        assert all(place.offset % 64 == 0 for place in plain.places.values())


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_codec_changes_plain_matrices_and_nothing_else(codec: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", **VARIANTS["mlp-bias"])))
    plain, encoded, buffer = packed_of(checkpoint, "auto", codec, 0, 2)
    stored, back = page_aligned(encoded.num_bytes, CPU).fill_(1), page_aligned(plain.num_bytes, CPU)
    encoded.encode(plain, buffer, stored)
    encoded.decode(stored, plain, back)
    through = parse_codec(WEIGHT_CODECS[codec])
    before, after = plain.tensors(buffer), plain.tensors(back)
    for field, matrix in before.items():
        came = after[field]
        assert isinstance(matrix, torch.Tensor)
        assert isinstance(came, torch.Tensor)
        if matrix.dim() == 1:
            assert torch.equal(came, matrix)
        else:
            flat = matrix.reshape(-1)
            once = through.decode(through.encode(flat), flat.numel(), flat.dtype)
            assert torch.equal(came.reshape(-1), once)
            assert not torch.equal(came, matrix)
    again = page_aligned(encoded.num_bytes, CPU).fill_(2)
    encoded.encode(plain, buffer, again)
    assert torch.equal(again, stored)  # bytes between tensors too, so that a checksum of the same weights is the same
    assert encoded.num_bytes < plain.num_bytes
    with pytest.raises(ValueError, match="decode it first"):
        encoded.tensors(stored)


def test_packed_matrices_are_not_encoded_again(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")))
    plain, encoded, _ = packed_of(checkpoint, "auto", "int4", 0, 1)
    assert plain == encoded
