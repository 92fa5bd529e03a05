"""The grammar of codec names. Imports no torch, so that a wrong name is refused at once."""

import re

from tightwire.kernels.spec.block_format import BlockFormat

_NAME = re.compile(r"(?:(fp8)|int([234568]))(?:-g(32|64|128))?(-sym)?(-had)?(?:-ef)?")
_FEEDBACK = "-ef"


def parse_format(name: str) -> BlockFormat | None:
    """``none`` (returns None), ``fp8`` or ``intB`` with B in 8, 6, 5, 4, 3, 2, then any of ``-g32 -g64 -sym -had -ef``.

    Raises ValueError for other names. The format of a codec with error feedback is that without.
    """
    if name == "none":
        return None
    match = _NAME.fullmatch(name)
    try:
        if match is None:
            raise ValueError("no such name")
        float8, bits, group, symmetric, hadamard = match.groups()
        return BlockFormat(
            bits=8 if float8 else int(bits),
            group_elems=int(group or 128),
            symmetric=symmetric is not None,
            hadamard=hadamard is not None,
            float8=float8 is not None,
        )
    except ValueError as error:
        raise ValueError(
            f"unknown codec {name!r} ({error}); a codec is none, fp8, or int8, int6, int5, int4, int3 or int2, and then "
            "optionally, in this order, -g32 or -g64 (numbers in a group, default 128), -sym (symmetric), -had (rotated), "
            "-ef (error feedback, in flash only), such as int4-g64-had-ef"
        ) from None


def has_feedback(name: str) -> bool:
    return name.endswith(_FEEDBACK)
