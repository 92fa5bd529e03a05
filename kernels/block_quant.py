"""Block quantization: a tensor to codes, scales and zeros in one run of bytes, and back.

``spec.block_format`` is the layout and ``spec.block_quant`` the reference; every device gives the reference's bytes. On CPU
native/codec computes, and groups are shared among torch's threads; without the library, functions are the reference's.
"""

from array import array

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import available, struct
from tightwire.kernels.cpu.run import NUMBER_KIND, addresses, run_on_rows
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import MAX_GROUP_ELEMS, BlockFormat

_CPU = torch.device("cpu")


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None, carried_M: Tensor | None = None) -> Tensor:
    """The bytes of ``encode_reference``, written into ``out`` when given; tensors are contiguous, else ValueError."""
    device, num_elems = (x_N.device if x_N.is_cuda else _CPU), x_N.numel()
    reference.check_numbers(x_N, "x_N", device)
    out = reference.bytes_for(num_elems, fmt, out, device)
    reference.check_carried(carried_M, fmt, num_elems, device)
    if x_N.is_cuda:  # imported on first use, here and below: a CPU host need not have Triton
        from tightwire.kernels.cuda import block_quant as triton

        triton.encode(x_N, fmt, out, carried_M)
    elif available():
        _run("tw_encode", out, x_N, fmt, carried_M)
    else:
        out.copy_(reference.encode_reference(x_N, fmt, carried_M))
    return out


def decode(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The numbers of ``decode_reference``, written into ``out`` when given: (num_elems,) of ``dtype``, contiguous."""
    device = buf.device if buf.is_cuda else _CPU
    out = torch.empty(num_elems, dtype=dtype, device=device) if out is None else out
    reference.check_numbers(out, "out", device)
    if out.dtype != dtype or out.numel() != num_elems:
        raise ValueError(f"out must be {num_elems} numbers of {dtype}, got {out.numel()} of {out.dtype}")
    reference.check_message(buf, fmt, num_elems, device)
    if buf.is_cuda:
        from tightwire.kernels.cuda import block_quant as triton

        triton.decode(buf, fmt, out)
    elif available():
        _run("tw_decode", buf, out, fmt)
    else:
        out.copy_(reference.decode_reference(buf, fmt, num_elems, dtype))
    return out


def decode_add(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``decode_add_reference``; ``sum_N`` is contiguous float32."""
    device = buf.device if buf.is_cuda else _CPU
    reference.check_numbers(sum_N, "sum_N", device)
    if sum_N.dtype != torch.float32:
        raise ValueError(f"sum_N must be float32, got {sum_N.dtype}")
    reference.check_message(buf, fmt, sum_N.numel(), device)
    if buf.is_cuda:
        from tightwire.kernels.cuda import block_quant as triton

        triton.decode(buf, fmt, sum_N, adds=True)
    elif available():
        _run("tw_decode_add", buf, sum_N, fmt)
    else:
        reference.decode_add_reference(buf, fmt, sum_N)


def decode_reduce_encode(
    bufs: list[Tensor],
    fmt: BlockFormat,
    out_fmt: BlockFormat,
    num_elems: int,
    out: Tensor | None = None,
    carried_M: Tensor | None = None,
) -> Tensor:
    """The bytes of ``decode_reduce_encode_reference``, written into ``out`` when given; at least one of ``bufs``.

    On CPU the sum never leaves the first-level cache.
    """
    if not bufs:
        raise ValueError("decode_reduce_encode needs at least one message to add, got none")
    device = bufs[0].device if bufs[0].is_cuda else _CPU
    for buf in bufs:
        reference.check_message(buf, fmt, num_elems, device)
    reference.check_carried(carried_M, out_fmt, num_elems, device)
    out = reference.bytes_for(num_elems, out_fmt, out, device)
    if out.is_cuda:
        from tightwire.kernels.cuda import block_quant as triton

        triton.decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out, carried_M)
    elif available():
        places = array("q", addresses(*bufs))
        messages, num_messages = places.buffer_info()
        tensors = *addresses(out), messages, *addresses(carried_M)
        arguments = struct("tw_recode_args", (*tensors, num_messages, num_elems, _fields(fmt), _fields(out_fmt)))
        run_on_rows("tw_decode_reduce_encode", arguments, -(-num_elems // MAX_GROUP_ELEMS), MAX_GROUP_ELEMS)
    else:
        out.copy_(reference.decode_reduce_encode_reference(bufs, fmt, out_fmt, num_elems, carried_M))
    return out


def _run(kernel: str, buf: Tensor, x_N: Tensor, fmt: BlockFormat, carried_M: Tensor | None = None) -> None:
    num_elems, kind = x_N.numel(), NUMBER_KIND[x_N.dtype]
    arguments = struct("tw_code_args", (*addresses(buf, x_N, carried_M), num_elems, kind, _fields(fmt)))
    run_on_rows(kernel, arguments, fmt.num_groups(num_elems), fmt.group_elems)


def _fields(fmt: BlockFormat) -> tuple[int, ...]:
    return fmt.bits, fmt.group_elems, fmt.symmetric, fmt.hadamard, fmt.float8
