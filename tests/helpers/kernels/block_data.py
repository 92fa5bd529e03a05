"""All block formats, and numbers that are hard for them."""

from itertools import product

import torch
from torch import Tensor

from tightwire.kernels.spec.block_format import GROUPS, PLANES, BlockFormat

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
CASE_ELEMS = 256  # whole groups of every format


def all_formats() -> list[BlockFormat]:
    formats = []
    for bits, size, symmetric, hadamard in product(PLANES, GROUPS, (False, True), (False, True)):
        formats.append(BlockFormat(bits, size, symmetric=symmetric, hadamard=hadamard))
    return formats + [BlockFormat(8, size, float8=True) for size in GROUPS]


def formats_with(group_elems: int) -> list[BlockFormat]:
    return [fmt for fmt in all_formats() if fmt.group_elems == group_elems]


def format_id(fmt: BlockFormat) -> str:
    flags = {"sym": fmt.symmetric, "had": fmt.hadamard, "fp8": fmt.float8}
    return "-".join([f"{fmt.bits}", f"g{fmt.group_elems}", *(name for name, on in flags.items() if on)])


def hard_cases() -> dict[str, Tensor]:
    """Float32, ``CASE_ELEMS`` of each; in 16 bits some of them overflow to infinity or vanish, which is a case as well."""
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(CASE_ELEMS, generator=generator)
    places = torch.arange(CASE_ELEMS)
    signs = torch.where(places % 2 == 0, 1.0, -1.0)
    return {
        "normal": normal,
        "constant": torch.full((CASE_ELEMS,), 7.3),
        "negative constant": torch.full((CASE_ELEMS,), -1e-3),
        "zeros": torch.zeros(CASE_ELEMS),
        "both zeros": signs * 0.0,
        "subnormal": normal * 1e-42,
        "smallest": signs * 2.0**-149,
        "around the least scale": normal * 2.0**-120,
        "beyond float16": normal * 1e6,
        "huge": normal * 1e30,
        "wide": (20 * normal).exp() * signs,
        "alternating": signs * 3.14159,
        "far from zero": 1000 + normal * 0.01,
        "half steps": (places % 33) * 0.5,
        "one outlier": torch.where(places == 77, 300.0, normal),
        "ends of float32": torch.linspace(-3.4e38, 3.4e38, CASE_ELEMS),
        "high end": torch.linspace(1e38, 3.4028234e38, CASE_ELEMS),
        "low end": torch.full((CASE_ELEMS,), -3.4028234e38),
        "largest range": torch.linspace(-1.69e38, 1.69e38, CASE_ELEMS),
        "an infinity": torch.where(places == 130, torch.inf, normal),
        "minus infinity": torch.where(places == 0, -torch.inf, normal),
        "nothing but NaN": torch.full((CASE_ELEMS,), torch.nan),
        "a NaN": torch.where(places == 255, torch.nan, normal),
    }


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """All cases one after the other."""
    return torch.cat(list(hard_cases().values())).to(dtype)
