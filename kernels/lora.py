"""Adds the low-rank adapters of a step's rows to a matrix product; ``spec.lora`` has the reference."""

from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.lora import add_adapters_cpu
from tightwire.kernels.spec.lora import AdapterRows, AdapterSite, add_adapters_reference


def add_adapters(out_TO: Tensor, x_TD: Tensor, site: AdapterSite, layer: int, rows: AdapterRows) -> None:
    """Add ``(x A^T) B^T`` of each row's adapter to ``out``, in place, in float32, rounded once to the dtype of ``out``.

    A row's bits depend on that row alone; rows without an adapter keep theirs.

    Args:
        out_TO: (T, O) contiguous, the product of the base matrix, in x's dtype or float32.
        x_TD: (T, D) contiguous rows, in the dtype of the adapters' matrices.
    Raises:
        ValueError: shapes, dtypes or layouts that do not match.
    Cost: for each adapter in the step, reading rank x (parts x D + O) numbers.
    """
    if x_TD.is_cuda:  # imported on first use: a CPU host need not have Triton
        from tightwire.kernels.cuda import lora as triton

        triton.add_adapters(out_TO, x_TD, site, layer, rows.entries_T)
    else:
        (add_adapters_cpu if available() else add_adapters_reference)(out_TO, x_TD, site, layer, rows)
