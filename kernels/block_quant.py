"""Block quantization: a tensor to codes, scales and zeros in one run of bytes, and back.

``spec.block_format`` is the layout and ``spec.block_quant`` the reference; every device gives the reference's bytes.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from tightwire.kernels.spec.block_format import BlockFormat


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None, carried_M: Tensor | None = None) -> Tensor:
    """The bytes of ``encode_reference``, written into ``out`` when given; tensors are contiguous, else ValueError."""
    return _kernels(x_N.device.type).encode(x_N, fmt, out, carried_M)


def decode(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The numbers of ``decode_reference``, written into ``out`` when given: (num_elems,) of ``dtype``, contiguous."""
    return _kernels(buf.device.type).decode(buf, fmt, num_elems, dtype, out)


def decode_add(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``decode_add_reference``; ``sum_N`` is contiguous float32."""
    _kernels(buf.device.type).decode_add(buf, fmt, sum_N)


def decode_reduce_encode(
    bufs: list[Tensor],
    fmt: BlockFormat,
    out_fmt: BlockFormat,
    num_elems: int,
    out: Tensor | None = None,
    carried_M: Tensor | None = None,
) -> Tensor:
    """The bytes of ``decode_reduce_encode_reference``, written into ``out`` when given; at least one of ``bufs``."""
    device_type = bufs[0].device.type if bufs else "cpu"
    return _kernels(device_type).decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out, carried_M)


@cache
def _kernels(device_type: str) -> ModuleType:
    """The module with these four functions for a device; imported on first use, as not all machines have Triton."""
    if device_type == "cuda":
        from tightwire.kernels.cuda import block_quant
    else:
        from tightwire.kernels.cpu import block_quant
    return block_quant
