"""Block quantization: a tensor to codes, scales and zeros in one run of bytes, and back.

``spec.block_format`` is the layout and ``spec.block_quant`` the reference; every device gives the reference's bytes.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from tightwire.kernels.spec.block_format import BlockFormat


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None, carried_N: Tensor | None = None) -> Tensor:
    """The bytes of ``encode_reference``, written into ``out`` when given; tensors are contiguous, else ValueError."""
    kernels = _kernels(x_N.device.type)
    if x_N.is_cpu:
        return kernels.encode(x_N, fmt, out, carried_N)
    if carried_N is None:
        return kernels.encode(x_N, fmt, out)
    encoded = kernels.encode(carried_N.add_(x_N), fmt, out)
    carried_N.sub_(kernels.decode(encoded, fmt, len(carried_N), torch.float32))
    return encoded


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
    carried_N: Tensor | None = None,
) -> Tensor:
    """The bytes of ``decode_reduce_encode_reference``, written into ``out`` when given; at least one of ``bufs``."""
    device_type = bufs[0].device.type if bufs else "cpu"
    kernels = _kernels(device_type)
    if device_type == "cpu":
        return kernels.decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out, carried_N)
    if carried_N is None:
        return kernels.decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out)
    sum_N = kernels.decode(bufs[0], fmt, num_elems, torch.float32)
    for buf in bufs[1:]:
        kernels.decode_add(buf, fmt, sum_N)
    return encode(sum_N, out_fmt, out, carried_N)


@cache
def _kernels(device_type: str) -> ModuleType:
    """The module with these four functions for a device; imported on first use, as not all machines have Triton."""
    return import_module(f"tightwire.kernels.{'cuda' if device_type == 'cuda' else 'cpu'}.block_quant")
