"""Matrix products of many bfloat16 rows on CPUs without bfloat16 units (AVX2): converts to float32, then uses torch.

On such a CPU torch multiplies bfloat16 matrices with scalar code: 9 GFLOP/s on a Zen 3 core. Its float32 product reaches
80 GFLOP/s, and this file 62 to 78 (512 rows, 3072 outputs of 576 inputs, weights converted in every call). ``linear_cpu``
reaches 60 to 67 with any number of rows: it is slower above about a hundred rows, and faster below (64 rows: 61 against 42).

torch chooses its float32 kernel by the number of rows, and its kernels add in different orders; above a few rows per thread
it always uses the same one. Fewer rows are therefore padded. ``rows_are_independent`` tests once whether this holds here.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_PER_THREAD = 8
_PROBE_OUTPUTS, _PROBE_INPUTS = 256, 512


def torch_has_bfloat16_products() -> bool:
    """Whether torch uses bfloat16 vector or matrix units of this CPU."""
    # Builds without oneDNN do not have the question either.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def torch_has_matrix_units() -> bool:
    """Whether torch multiplies bfloat16 in this CPU's matrix units (AMX), many times as fast as vectors do."""
    return torch_has_bfloat16_products() and torch.cpu._is_amx_tile_supported()


def linear_widened(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias`` in float32, rounded once to the dtype of ``x`` or ``out_dtype``; on CPU.

    A row's bits depend on that row alone where ``rows_are_independent``.
    """
    num_rows = len(x_TD)
    x_PD = x_TD.float()
    if num_rows < _least_rows():
        x_PD = F.pad(x_PD, (0, 0, 0, _least_rows() - num_rows))
    product_PO = F.linear(x_PD, weight_OD.float(), None if bias_O is None else bias_O.float())
    return product_PO[:num_rows].to(out_dtype or x_TD.dtype)


def rows_are_independent() -> bool:
    """Whether this torch, on this CPU and with this many threads, gives a row the same bits among few and among many."""
    return _rows_are_independent(torch.get_num_threads())


@functools.cache
def _rows_are_independent(num_threads: int) -> bool:
    random = torch.Generator().manual_seed(0)
    weight_OD = torch.randn(_PROBE_OUTPUTS, _PROBE_INPUTS, generator=random)
    few = _least_rows()
    x_TD = torch.randn(4 * few + 13, _PROBE_INPUTS, generator=random)
    together = F.linear(x_TD, weight_OD)
    return all(
        torch.equal(F.linear(x_TD[first : first + few], weight_OD), together[first : first + few])
        for first in range(0, 3 * few, few // 2)
    )


def _least_rows() -> int:
    return _ROWS_PER_THREAD * torch.get_num_threads()
