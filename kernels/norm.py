"""Root-mean-square normalization, alone or with the residual sum before it. A row's bits depend on that row alone."""

from importlib import import_module
from typing import Any

from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.rows import add_rms_norm_cpu, rms_norm_cpu
from tightwire.kernels.spec.layer_ops import add_rms_norm_reference, rms_norm_reference


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``rms_norm_reference``, equal to it but for the order of the fp32 sum over D.

    Raises:
        ValueError: shapes or dtypes of x and weight that do not match.
    """
    if x_TD.is_cuda:
        return _triton().rms_norm(x_TD, weight_D, eps)
    return (rms_norm_cpu if available() else rms_norm_reference)(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm_reference`` in one pass: the normalized sum and the sum itself, both new tensors."""
    if x_TD.is_cuda:
        return _triton().add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return (add_rms_norm_cpu if available() else add_rms_norm_reference)(x_TD, residual_TD, weight_D, eps)


def _triton() -> Any:
    """Imported on first use: a CPU host need not have Triton."""
    return import_module("tightwire.kernels.cuda.norm")
