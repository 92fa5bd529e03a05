"""AllReduces with formats of ``compared_formats`` on both legs, for ``bench quality`` only: ``spec:NAME``.

Each rank gets the others' numbers exactly and computes both legs, so what it sends are not the bytes of the format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tightwire.bench.quality.compared_formats import AMD_SCALE_BITS, affine, amd, uniform
from tightwire.bench.quality.options import RING, SPEC, is_compared
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.codec.codec import Feedback, parse_codec
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce


@dataclass(frozen=True, slots=True)
class Compared:
    """``through`` encodes and decodes a (T, D) tensor in float32; a row takes ``row_bits`` and ``bits`` for each number."""

    through: Callable[[Tensor], Tensor]
    bits: float
    row_bits: int = 0

    def row_bytes(self, row_elems: int, world_size: int) -> float:
        """Bytes that a rank would send for a row in both legs, averaged over ranks."""
        return 2 * (world_size - 1) / world_size * (row_elems * self.bits + self.row_bits) / 8


def compared(name: str) -> Compared:
    """The format of ``spec:amd-intB``, ``spec:amd-intB-rows``, ``spec:uniform-intB``, ``spec:affine-intB`` or ``spec:ring-intB``; ``options.is_compared`` checks names.

    ``-rows``: each row is first multiplied by a power of two, so that its largest size is in AMD's range of scales.
    """
    kind, bits, *rows = name.removeprefix(SPEC).replace("-int", "-").split("-")
    if kind == "uniform":
        return Compared(lambda x: uniform(x, int(bits)), int(bits), row_bits=16)
    if name.startswith(RING):
        codec = parse_codec(name.removeprefix(RING))
        bits = 8 * codec.wire_bytes(1024, 4) / 1024
        return Compared(lambda x: codec.decode(codec.encode(x.flatten()), x.numel(), x.dtype).view(x.shape), bits)
    if kind == "affine":
        return Compared(lambda x: affine(x, int(bits)), int(bits), row_bits=32)
    number_bits = int(bits) + AMD_SCALE_BITS
    if not rows:
        return Compared(lambda x: amd(x, int(bits)), number_bits)
    return Compared(lambda x: _in_range(x.float(), lambda y: amd(y, int(bits))), number_bits, row_bits=8)


def _in_range(x_TD: Tensor, through: Callable[[Tensor], Tensor]) -> Tensor:
    """``through`` of rows whose largest size is 224 to 448, and back."""
    exponent_T1 = torch.frexp(x_TD.abs().amax(1, keepdim=True) / 448)[1]
    return torch.ldexp(through(torch.ldexp(x_TD, -exponent_T1)), exponent_T1)


def make_any(name: str, group: Group) -> AllReduce:
    """Make the AllReduce ``name`` of the registry or of this file; ValueError for other names."""
    return ComparedAllReduce(name, group) if is_compared(name) else make_all_reduce(name, group)


class ComparedAllReduce:
    """Sums (T, D) tensors: each rank's is encoded and decoded, added in float32, then the sum is encoded and decoded."""

    lossless = False

    def __init__(self, name: str, group: Group) -> None:
        self.name, self._group, self._format = name, group, compared(name)

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        own = x.contiguous()
        sizes = [own.nbytes] * self._group.world_size
        parts = self._group.transport.gather(own.view(-1).view(torch.uint8), sizes)
        through = self._format.through
        numbers = [part.view(x.dtype).view(x.shape).float() for part in parts]
        if self.name.startswith(RING):
            # Each rank encodes the sum so far for the next one. Real rings begin each slice elsewhere.
            return through(reduce(lambda total, part: through(total) + part, numbers)).to(x.dtype)
        return through(torch.stack([through(part) for part in numbers]).sum(0)).to(x.dtype)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        """Bytes that a rank would send for one row of ``num_elems``."""
        return round(self._format.row_bytes(num_elems, self._group.world_size))

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Infinite: the self-test of servers, which needs a bound, knows no such sum."""
        return torch.full_like(inputs[0], torch.inf, dtype=torch.float64)
