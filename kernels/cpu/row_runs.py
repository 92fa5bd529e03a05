"""Runs of rows copied from one tensor to another whose rows are alike: what moves a paged cache's blocks."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel


def copy_runs_reference(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
    """``target[t : t + count] = source[s : s + count]`` for every run (s, t, count)."""
    for source, target, count in runs_R3.tolist():
        target_NX[target : target + count].copy_(source_MX[source : source + count], non_blocking=True)


def copy_runs(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
    """The reference: on a CPU in one call that lets other threads run; beside CUDA one copy a run, queued.

    Args:
        target_NX, source_MX: contiguous, of one dtype, with rows of one shape; one of them may be on a CUDA device, and
            what is on the host then had better be pinned.
        runs_R3: (R, 3) int64 on the host: first row in the source, first row in the target, number of rows.
    Raises:
        ValueError: shapes or dtypes that do not fit together, or a run outside of one of the tensors.
    Cost: the rows' bytes, read and written once; beside CUDA some microseconds of the host's a run.
    """
    if target_NX.shape[1:] != source_MX.shape[1:] or target_NX.dtype != source_MX.dtype:
        raise ValueError(
            f"rows of {tuple(target_NX.shape[1:])} {target_NX.dtype} cannot be had from rows of "
            f"{tuple(source_MX.shape[1:])} {source_MX.dtype}"
        )
    if not (target_NX.is_contiguous() and source_MX.is_contiguous() and runs_R3.is_contiguous()):
        raise ValueError("copy_runs needs contiguous tensors")
    if runs_R3.dtype != torch.int64 or runs_R3.dim() != 2 or runs_R3.shape[1] != 3:
        raise ValueError(f"copy_runs needs runs (R, 3) in int64, got {tuple(runs_R3.shape)} {runs_R3.dtype}")
    wrong = check_runs(runs_R3.data_ptr(), len(runs_R3), len(source_MX), len(target_NX))
    if wrong >= 0:
        raise ValueError(
            f"run {wrong} is {runs_R3[wrong].tolist()} (source, target, count); "
            f"there are {len(source_MX)} rows to copy from and {len(target_NX)} to copy to"
        )
    if target_NX.is_cuda or source_MX.is_cuda:
        copy_runs_reference(target_NX, source_MX, runs_R3)
    elif len(runs_R3):
        row_bytes = source_MX[0].numel() * source_MX.element_size()
        copy_rows(target_NX.data_ptr(), source_MX.data_ptr(), runs_R3.data_ptr(), len(runs_R3), row_bytes)


@kernel
def check_runs(runs: int, num_runs: int, num_source_rows: int, num_target_rows: int) -> int:
    """Minus one, or the first run that is not inside both tensors."""
    for run in range(num_runs):
        source, target = simd.load_i64(runs + 24 * run), simd.load_i64(runs + 24 * run + 8)
        count = simd.load_i64(runs + 24 * run + 16)
        if min(source, target, count) < 0 or source + count > num_source_rows or target + count > num_target_rows:
            return run
    return -1


@kernel
def copy_rows(target: int, source: int, runs: int, num_runs: int, row_bytes: int) -> None:
    for run in range(num_runs):
        first, place = simd.load_i64(runs + 24 * run), simd.load_i64(runs + 24 * run + 8)
        count = simd.load_i64(runs + 24 * run + 16)
        simd.copy_bytes(target + place * row_bytes, source + first * row_bytes, count * row_bytes)
