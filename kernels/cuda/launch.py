"""How the project's Triton kernels are launched."""

from contextlib import nullcontext
from typing import Any

import torch

# Kernels count on 128 threads where they say how many numbers each has.
NUM_WARPS = 4
NUM_STAGES = 3  # loads of a loop's next rounds that are under way at once; Triton's own default


def launch(
    kernel: Any,
    num_programs: int,
    device: torch.device,
    *args: object,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> None:
    """Run ``num_programs`` of ``kernel`` on ``device``, in its current stream; CPU tensors go to Triton's interpreter.

    Multiplications and additions stay apart: fused they round once where the references round twice.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(num_programs,)](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


def padded(size: int, at_least: int = 1) -> int:
    """The sides of a kernel's tiles are powers of two: the smallest that holds ``size`` numbers."""
    return max(at_least, 1 << (size - 1).bit_length())
