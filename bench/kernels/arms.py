"""What ``bench kernels`` times: an operation on memory of its own, the bytes it moves, and whether its answer is right.

Every arm has several sets of buffers and takes another one at each call, so that a GPU's cache does not hold what the
next call reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import BlockFormat

OPERATIONS = ("encode", "decode", "decode-add", "decode-reduce-encode")
_MAX_SETS = 16
_SETS_BYTES = 256 << 20  # more than any GPU's last cache
_NUM_SUMMED = 4  # messages that decode-reduce-encode adds


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """``call(i)`` runs it on the buffers of set i, counted around; ``is_right`` compares the last results."""

    name: str
    codec: str
    call: Callable[[int], object]
    moved_bytes: int  # read and written by one call, each byte once
    is_right: Callable[[], bool]


def copy_arm(num_bytes: int, device: torch.device) -> Arm:
    """What memory allows: torch's copy of ``num_bytes``."""
    sets = [
        (torch.ones(num_bytes, dtype=torch.uint8, device=device), _bytes(num_bytes, device)) for _ in _sets(num_bytes)
    ]
    return Arm(
        name="copy",
        codec="none",
        call=lambda i: sets[i % len(sets)][1].copy_(sets[i % len(sets)][0]),
        moved_bytes=2 * num_bytes,
        is_right=lambda: torch.equal(*sets[0]),
    )


def codec_arms(name: str, num_bytes: int, dtype: torch.dtype, device: torch.device) -> Iterator[Arm]:
    """The four operations of a codec on ``num_bytes`` of numbers; memory is made beforehand, as in an AllReduce."""
    fmt = parse_codec(name).format
    if fmt is None:
        raise ValueError(f"codec {name!r} does not quantize; there is nothing to time")
    num_elems = num_bytes // dtype.itemsize
    generator = torch.Generator(device=device).manual_seed(0)
    x_N = torch.randn(num_elems, generator=generator, device=device).to(dtype)
    encoded = reference.encode_reference(x_N, fmt)
    yield _encode(name, fmt, x_N, encoded)
    yield _decode(name, fmt, x_N, encoded)
    yield _decode_add(name, fmt, x_N, encoded)
    yield _decode_reduce_encode(name, fmt, x_N, encoded)


def _encode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(x_N.clone(), torch.empty_like(encoded)) for _ in _sets(x_N.nbytes)]
    return Arm(
        name="encode",
        codec=name,
        call=lambda i: block_quant.encode(sets[i % len(sets)][0], fmt, sets[i % len(sets)][1]),
        moved_bytes=x_N.nbytes + encoded.nbytes,
        is_right=lambda: torch.equal(sets[0][1], encoded),
    )


def _decode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(encoded.clone(), torch.empty_like(x_N)) for _ in _sets(x_N.nbytes)]
    num_elems, dtype = x_N.numel(), x_N.dtype
    return Arm(
        name="decode",
        codec=name,
        call=lambda i: block_quant.decode(sets[i % len(sets)][0], fmt, num_elems, dtype, sets[i % len(sets)][1]),
        moved_bytes=x_N.nbytes + encoded.nbytes,
        is_right=lambda: torch.equal(sets[0][1], reference.decode_reference(encoded, fmt, num_elems, dtype)),
    )


def _decode_add(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(encoded.clone(), torch.zeros(x_N.numel(), device=x_N.device)) for _ in _sets(4 * x_N.numel())]

    def is_right() -> bool:
        # After many timed calls the sums are of their own; one more call from a known sum tells.
        sets[0][1].fill_(1.0)
        block_quant.decode_add(sets[0][0], fmt, sets[0][1])
        want = torch.ones_like(sets[0][1])
        reference.decode_add_reference(encoded, fmt, want)
        return torch.equal(sets[0][1], want)

    return Arm(
        name="decode-add",
        codec=name,
        call=lambda i: block_quant.decode_add(sets[i % len(sets)][0], fmt, sets[i % len(sets)][1]),
        moved_bytes=encoded.nbytes + 8 * x_N.numel(),
        is_right=is_right,
    )


def _decode_reduce_encode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [
        ([encoded.clone() for _ in range(_NUM_SUMMED)], torch.empty_like(encoded))
        for _ in _sets(_NUM_SUMMED * encoded.nbytes)
    ]
    num_elems = x_N.numel()

    def is_right() -> bool:
        bufs = [encoded] * _NUM_SUMMED
        return torch.equal(sets[0][1], reference.decode_reduce_encode_reference(bufs, fmt, fmt, num_elems))

    return Arm(
        name="decode-reduce-encode",
        codec=name,
        call=lambda i: block_quant.decode_reduce_encode(
            sets[i % len(sets)][0], fmt, fmt, num_elems, sets[i % len(sets)][1]
        ),
        moved_bytes=(_NUM_SUMMED + 1) * encoded.nbytes,
        is_right=is_right,
    )


def _sets(num_bytes: int) -> range:
    return range(max(1, min(_MAX_SETS, _SETS_BYTES // max(1, num_bytes))))


def _bytes(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
