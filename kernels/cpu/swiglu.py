"""The MLP's activation on CPU."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers, rounded, size_of, store_rounded
from tightwire.kernels.cpu.vector.simd import LANES, NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_rows


def swiglu_cpu(gate_up_T2F: Tensor) -> Tensor:
    """``swiglu.swiglu`` for CPU tensors."""
    num_tokens, columns = gate_up_T2F.shape
    if columns % 2 or gate_up_T2F.dtype not in NUMBER_KIND or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"swiglu needs (T, 2F) with contiguous rows in one of {', '.join(map(str, NUMBER_KIND))}; "
            f"got {tuple(gate_up_T2F.shape)} {gate_up_T2F.dtype} with strides {gate_up_T2F.stride()}"
        )
    out_TF = torch.empty((num_tokens, columns // 2), dtype=gate_up_T2F.dtype)
    arguments = (
        out_TF.data_ptr(),
        gate_up_T2F.data_ptr(),
        gate_up_T2F.stride(0) * gate_up_T2F.element_size(),
        columns // 2,
        NUMBER_KIND[gate_up_T2F.dtype],
    )
    run_on_rows(swiglu_rows, arguments, num_tokens, columns)
    return out_TF


@kernel
def swiglu_rows(out: int, gate_up: int, row_stride: int, width: int, kind: int, start: int, stop: int) -> None:
    """Rows ``start`` to ``stop``; ``row_stride`` is bytes, ``out`` is contiguous."""
    number_bytes = size_of(kind)
    one = simd.splat(1.0)
    zero = simd.splat(0.0)
    for row in range(start, stop):
        gates = gate_up + row * row_stride
        target = out + row * width * number_bytes
        for at in range(0, width, LANES):
            gate = load_numbers(gates + number_bytes * at, kind, width - at)
            up = load_numbers(gates + number_bytes * (width + at), kind, width - at)
            silu = simd.div(gate, simd.add(one, simd.exp(simd.sub(zero, gate))))
            store_rounded(target + number_bytes * at, simd.mul(rounded(silu, kind), up), kind, width - at)
