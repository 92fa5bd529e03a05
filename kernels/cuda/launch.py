"""Launches Triton kernels, on some GPUs while the kernel before ends; so each calls ``wait_for_last`` first."""

import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tightwire.kernels.cuda.numbers import INTERPRETED

# Kernels whose comments state numbers per thread assume 128 threads.
NUM_WARPS = 4
NUM_STAGES = 3  # iterations of a loop whose loads are in flight at once; Triton's own default
_YES = tl.constexpr(True)


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
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg, "enable_fp_fusion": False}
        kernel[(num_programs,)](*args, **options, launch_pdl=_overlaps(device))


@cache
def _overlaps(device: torch.device) -> bool:
    """Return True on GPUs of 9.x and 10.x, unless TIGHTWIRE_OVERLAP is 0. Overlaps on 12.0 were reported to fail in captures."""
    if os.environ.get("TIGHTWIRE_OVERLAP") == "0" or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def wait_for_last(STARTS_NEXT: tl.constexpr = _YES):
    """Wait until the kernel before has ended and its writes can be seen. STARTS_NEXT: then the next one may start, and wait here."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        gdc_wait()
        if STARTS_NEXT:
            gdc_launch_dependents()


def padded(size: int, at_least: int = 1) -> int:
    """The smallest power of two that holds ``size`` numbers, as the sides of tiles must be."""
    return max(at_least, 1 << (size - 1).bit_length())
