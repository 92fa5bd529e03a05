"""Matrix products on CPU, and unpacking: the host of native/linear. ``kernels.linear`` has the reasons."""

from dataclasses import replace

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import ffi, has_pairs, lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND, addresses, run_on_items, run_on_rows
from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS, INTERLEAVED_ROWS
from tightwire.kernels.spec.layer_ops import check_linear
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight

# One thread multiplies with this many weights (with eight rows, or waiting for memory with fewer) in about 100 us.
_WORK_PER_THREAD = 1 << 20
_ROWS_AT_ONCE = 16  # an item of tw_prepare_rows

# Bits of the kind of a packed format (native/linear/formats.h).
_INT8, _INTERLEAVED = 32, 64


def gated_linear_cpu(x_TD: Tensor, weight_ED: Weight, bias_E: Tensor | None, *, gelu: bool) -> Tensor | None:
    """The bits of ``swiglu_cpu`` of ``linear_cpu``, at once; None unless many rows are multiplied in matrix units."""
    in_units = x_TD.dtype == torch.bfloat16 and 0 < lib.tw_gated_rows() <= len(x_TD) and x_TD.shape[1] > 0
    if not in_units or any(kind & _INT8 for _, _, kind, _ in weight_parts(weight_ED)):
        return None
    half, is_odd = divmod(weight_ED.shape[0], 2)
    if isinstance(weight_ED, Tensor):
        gate, up = weight_ED[:half], weight_ED[half:]
    else:
        gate, up = weight_ED.rows(0, half), weight_ED.rows(half, 2 * half)
    if is_odd or gate.shape[0] != half or up.shape[0] != half:  # a half of several parts has fewer rows here
        return None
    biases = (None, None) if bias_E is None else bias_E.split(half)
    return linear_cpu(x_TD, gate, biases[0], up=(up, biases[1], gelu))


def linear_cpu(
    x_TD: Tensor,
    weight_OD: Matrix,
    bias_O: Tensor | None,
    out_dtype: torch.dtype | None = None,
    up: tuple[Matrix, Tensor | None, bool] | None = None,
) -> Tensor:
    """``linear.linear`` for CPU tensors; see there. ``up``: the matrix that it gates, its bias, and whether by gelu."""
    out_dtype = out_dtype or x_TD.dtype
    check_linear(x_TD, weight_OD, bias_O)
    (num_tokens, num_inputs), num_outputs = x_TD.shape, weight_OD.shape[0]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=out_dtype)
    kind, in_pairs = NUMBER_KIND[x_TD.dtype], x_TD.dtype == torch.bfloat16 and has_pairs()
    weight, weight_stride, weight_kind = matrix_integers(weight_OD)
    x_stride = x_TD.stride(0) * x_TD.element_size()
    second = ffi.NULL
    if up is not None:
        check_linear(x_TD, *up[:2])
        address, *described = matrix_integers(up[0])
        second = struct("tw_up_args", (address, *addresses(up[1]), *described, up[2]))
    sizes = num_tokens, num_inputs, num_outputs * (2 if up else 1)
    rows = struct("tw_rows_args", (0, x_TD.data_ptr(), x_stride, *sizes, kind, weight_kind))
    if num_bytes := lib.tw_prepared_bytes(rows):
        prepared = torch.empty(num_bytes, dtype=torch.uint8)
        rows.out, x_stride = prepared.data_ptr(), lib.tw_prepared_stride(rows)
        run_on_rows("tw_prepare_rows", rows, -(-num_tokens // _ROWS_AT_ONCE), _ROWS_AT_ONCE * num_inputs)
    places = out_TO.data_ptr(), rows.out or rows.x, weight, *addresses(bias_O)
    sizes = x_stride, weight_stride, weight_kind, num_tokens, num_outputs, num_inputs
    arguments = struct("tw_linear_args", (*places, *sizes, NUMBER_KIND[out_dtype], kind, in_pairs, second))
    num_threads = min(torch.get_num_threads(), useful_threads(num_tokens, num_outputs * num_inputs))
    at_once = lib.tw_outputs_at_once(arguments, num_threads)
    run_on_items("tw_linear", arguments, num_outputs, at_once, min(num_threads, -(-num_outputs // at_once)))
    return out_TO


def matrix_integers(weight_OD: Matrix) -> tuple[int, int, int]:
    """A matrix as kernels know it: address, bytes from row to row, kind of its numbers or blocks."""
    if isinstance(weight_OD, PackedMatrix):
        kind = weight_OD.format.kind
        if weight_OD.format.int8_activations:
            kind |= _INT8 | _INTERLEAVED if weight_OD.interleaved else _INT8
        return weight_OD.blocks_OB.data_ptr(), weight_OD.blocks_OB.stride(0), kind
    return weight_OD.data_ptr(), weight_OD.stride(0) * weight_OD.element_size(), NUMBER_KIND[weight_OD.dtype]


def weight_parts(weight: Weight) -> list[tuple[int, int, int, int]]:
    """The fields of each ``tw_matrix_part``."""
    parts = weight.parts if isinstance(weight, StackedMatrix) else (weight,)
    return [(*matrix_integers(part), part.shape[0]) for part in parts]


def useful_threads(num_rows: int, num_weights: int) -> int:
    """The number of threads worth waking to multiply rows with weights, of one matrix or of several."""
    return 1 + num_weights * (num_rows + 7) // 8 // _WORK_PER_THREAD


def unpack_cpu(matrix: PackedMatrix, dtype: torch.dtype, indices_T: Tensor | None = None) -> Tensor:
    """``packed.dequantize`` of all rows, or of those with these int64 indices, for CPU tensors and a dtype of ``NUMBER_KIND``."""
    num_rows, num_columns = matrix.shape
    num_unpacked = num_rows if indices_T is None else len(indices_T)
    out_OD = torch.empty(num_unpacked, num_columns, dtype=dtype)
    blocks, row_stride, kind = matrix_integers(matrix)
    places = out_OD.data_ptr(), blocks, *addresses(indices_T)
    arguments = *places, NUMBER_KIND[dtype], kind, row_stride, num_rows, num_columns // GROUP_ELEMS
    run_on_rows("tw_unpack", struct("tw_unpack_args", arguments), num_unpacked, num_columns)
    return out_OD


def interleave_cpu(matrix: PackedMatrix) -> PackedMatrix:
    """Interleave rows in place, for activations in 8 bits. Cost: one pass, memory of sixteen rows for each thread."""
    assert not (matrix.interleaved or matrix.by_plane)
    num_rows, num_columns = matrix.shape
    arguments = (matrix.blocks_OB.data_ptr(), matrix.format.kind, num_columns // GROUP_ELEMS)
    num_panels = num_rows // INTERLEAVED_ROWS
    run_on_rows("tw_interleave", struct("tw_interleave_args", arguments), num_panels, INTERLEAVED_ROWS * num_columns)
    return replace(matrix, interleaved=True)
