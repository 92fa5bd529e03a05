"""How the project's Triton kernels are launched."""

from contextlib import nullcontext
from typing import Any

import torch

# Kernels count on 128 threads where they say how many numbers each has.
NUM_WARPS = 4


def launch(kernel: Any, num_programs: int, device: torch.device, *args: object) -> None:
    """Run ``num_programs`` of ``kernel`` on ``device``, in its current stream; CPU tensors go to Triton's interpreter.

    Multiplications and additions stay apart: fused they round once where the references round twice.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(num_programs,)](*args, num_warps=NUM_WARPS, enable_fp_fusion=False)
