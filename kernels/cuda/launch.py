"""Launches Triton kernels."""

from contextlib import nullcontext
from typing import Any

import torch

# Kernels whose comments state numbers per thread assume 128 threads.
NUM_WARPS = 4
NUM_STAGES = 3  # iterations of a loop whose loads are in flight at once; Triton's own default


def launch(
    kernel: Any,
    num_programs: int,
    device: torch.device,
    *args: object,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
    maxnreg: int | None = None,
) -> None:
    """Run ``num_programs`` of ``kernel`` on ``device``, in its current stream; CPU tensors go to Triton's interpreter.

    Multiplications and additions are not fused: fused ones round once where the references round twice.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        kernel[(num_programs,)](*args, **options, enable_fp_fusion=False)


def padded(size: int, at_least: int = 1) -> int:
    """The smallest power of two that holds ``size`` numbers, as the sides of tiles must be."""
    return max(at_least, 1 << (size - 1).bit_length())
