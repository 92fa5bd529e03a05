"""Matrix products of many bfloat16 rows on CPUs without bfloat16 units (AVX2): widened to float32, as torch does not.

There torch multiplies bfloat16 matrices with scalar code: 9 GFLOP/s on a Zen 3 core, where its float32 product reaches
80 and this file 62 to 78 (512 rows, 3072 outputs of 576 inputs, the weights widened in every call). ``linear_cpu`` is
at 60 to 67 whatever their number: behind from some hundred rows on, and ahead below, at 64 rows with 61 to 42.

In float32 torch picks its kernel by the number of rows, and kernels differ in the order they add in; from a few rows a
thread on it is one kernel. So few rows are padded, and whether that holds here is asked once, by trying.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_PER_THREAD = 8
_PROBE_OUTPUTS, _PROBE_INPUTS = 256, 512


def torch_has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 in its vector or matrix units, as torch sees it."""
    # Builds without oneDNN do not have the question either.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear_widened(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in float32, rounded once to the dtype of ``x``; on CPU.

    A row's bits depend on that row alone where ``rows_are_independent``.
    """
    num_rows = len(x_TD)
    x_PD = x_TD.float()
    if num_rows < _least_rows():
        x_PD = F.pad(x_PD, (0, 0, 0, _least_rows() - num_rows))
    product_PO = F.linear(x_PD, weight_OD.float(), None if bias_O is None else bias_O.float())
    return product_PO[:num_rows].to(x_TD.dtype)


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
