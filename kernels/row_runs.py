"""Copies runs of rows from one tensor to another with rows of the same shape: moves blocks of a paged cache."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import available, lib


def copy_runs_reference(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
    """``target[t : t + count] = source[s : s + count]`` for every run (s, t, count)."""
    for source, target, count in runs_R3.tolist():
        target_NX[target : target + count].copy_(source_MX[source : source + count], non_blocking=True)


def copy_runs(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
    """Copy every run as ``copy_runs_reference``: on a CPU in one call that lets other threads run, with CUDA by one queued copy each.

    Args:
        target_NX, source_MX: contiguous, of one dtype, with rows of one shape; one of them may be on a CUDA device, and
            then the one on the host should be pinned.
        runs_R3: (R, 3) int64 on the host: first row in the source, first row in the target, number of rows.
    Raises:
        ValueError: shapes or dtypes that do not match, or a run outside of one of the tensors.
    """
    if target_NX.shape[1:] != source_MX.shape[1:] or target_NX.dtype != source_MX.dtype:
        raise ValueError(
            f"copy_runs needs rows of one shape and dtype; got {tuple(target_NX.shape[1:])} {target_NX.dtype} "
            f"and {tuple(source_MX.shape[1:])} {source_MX.dtype}"
        )
    if not (target_NX.is_contiguous() and source_MX.is_contiguous() and runs_R3.is_contiguous()):
        raise ValueError("copy_runs needs contiguous tensors")
    if runs_R3.dtype != torch.int64 or runs_R3.dim() != 2 or runs_R3.shape[1] != 3:
        raise ValueError(f"copy_runs needs runs (R, 3) in int64, got {tuple(runs_R3.shape)} {runs_R3.dtype}")
    source_R, target_R, count_R = runs_R3.unbind(1)
    inside_R = (runs_R3 >= 0).all(1) & (source_R <= len(source_MX) - count_R) & (target_R <= len(target_NX) - count_R)
    if not inside_R.all():
        wrong = int(inside_R.logical_not().int().argmax())
        run = f"run {wrong} is {runs_R3[wrong].tolist()} (source, target, count)"
        raise ValueError(f"{run}; there are {len(source_MX)} rows to copy from and {len(target_NX)} to copy to")
    if target_NX.is_cuda or source_MX.is_cuda or not available():
        copy_runs_reference(target_NX, source_MX, runs_R3)
    elif len(runs_R3):
        row_bytes = source_MX.shape[1:].numel() * source_MX.element_size()
        lib.tw_copy_runs(target_NX.data_ptr(), source_MX.data_ptr(), runs_R3.data_ptr(), len(runs_R3), row_bytes)
