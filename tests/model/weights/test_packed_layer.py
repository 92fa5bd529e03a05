"""Packed layers: every tensor at its place, encoded and decoded, with the bits of separate tensors."""

from pathlib import Path

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import VARIANTS, make_tiny

from tightwire.buffers import page_aligned
from tightwire.comm.codec.codec import parse_codec
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.formats import choose_formats, layer_tensors, read_tensors
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


@pytest.mark.parametrize("source", [*sorted(VARIANTS), "Q8_0", "Q4_1"])
def test_tensors_are_aligned_and_do_not_overlap(source: str, tmp_path: Path) -> None:
    if source in ("Q8_0", "Q4_1"):
        checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", quant=source)))
    else:
        checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", **VARIANTS[source])))
    for rank in range(2):
        plain, _, buffer = packed_of(checkpoint, "auto", "none", rank, 2)
        assert plain.num_bytes % 4096 == 0
        places = list(plain.places.values())
        assert all(place.offset % 64 == 0 for place in places)
        ends = [place.offset + place.num_bytes for place in places]
        assert all(end <= place.offset for end, place in zip(ends, places[1:], strict=False))
        assert ends[-1] <= plain.num_bytes
        tensors = layer_tensors(checkpoint.config, make_layout(checkpoint.config, 2).shards[rank], 1)
        assert {field: matrix.shape for field, matrix in plain.tensors(buffer).items()} == {
            field: fused.shape for field, fused in tensors.items()
        }


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
