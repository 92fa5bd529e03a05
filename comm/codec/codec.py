"""Codecs by name: encodings of a tensor for the wire, such as ``none``, ``int8`` or ``int4-g64-had``.

``kernels.block_quant`` defines the bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.comm.codec.codec_names import parse_format
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_bound
from tightwire.kernels.spec.block_format import BlockFormat


@dataclass(frozen=True, slots=True)
class Codec:
    """``format`` None is ``none``: the numbers unchanged, in their own dtype."""

    name: str
    format: BlockFormat | None = None

    @property
    def exact(self) -> bool:
        return self.format is None

    @property
    def group_elems(self) -> int:
        """Elements that are encoded together; a message may be split at multiples of this."""
        return 1 if self.format is None else self.format.group_elems

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return num_elems * elem_bytes if self.format is None else self.format.encoded_bytes(num_elems)

    def encode(self, x_N: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode (N,) contiguous to uint8 bytes, into ``out`` if given. With ``none`` and no ``out``, a view of ``x_N``."""
        if self.format is not None:
            return block_quant.encode(x_N, self.format, out)
        bytes_of_x = x_N.view(torch.uint8)
        return bytes_of_x if out is None else out.copy_(bytes_of_x)

    def decode(self, buf: Tensor, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Decode ``num_elems`` numbers of ``dtype`` from ``buf``. With ``none`` and no ``out``, a view of ``buf``."""
        if self.format is not None:
            return block_quant.decode(buf, self.format, num_elems, dtype, out)
        return buf.view(dtype) if out is None else out.copy_(buf.view(dtype))

    def decode_add(self, buf: Tensor, sum_N: Tensor, dtype: torch.dtype) -> None:
        """Add the numbers of ``buf``, of ``dtype`` before encoding, to the float32 ``sum_N``."""
        if self.format is not None:
            block_quant.decode_add(buf, self.format, sum_N)
        else:
            sum_N.add_(buf.view(dtype))

    def max_error(self, x_N: Tensor) -> Tensor:
        """(N,) float64: bounds on |decode(encode(x)) - x| before rounding (``kernels.spec.block_bound``)."""
        if self.format is None:
            return torch.zeros(x_N.shape, dtype=torch.float64, device=x_N.device)
        return block_bound.max_error(x_N, self.format)


def parse_codec(name: str) -> Codec:
    return Codec(name, parse_format(name))
