"""The MLP's activation: ``silu(gate) * up``."""

from importlib import import_module

from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.rows import swiglu_cpu
from tightwire.kernels.spec.layer_ops import swiglu_reference


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """``swiglu_reference``, within a few units in the last place of float32 before it rounds; contiguous.

    Raises:
        ValueError: an odd number of columns, or a dtype without a kernel.
    """
    if gate_up_T2F.is_cuda:  # imported on first use: a CPU host need not have Triton
        return import_module("tightwire.kernels.cuda.swiglu").swiglu(gate_up_T2F)
    return (swiglu_cpu if available() else swiglu_reference)(gate_up_T2F)
