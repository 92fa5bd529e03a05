"""The grammar of codec names. Imports no torch, so that a wrong name is refused at once."""

import re

from tightwire.kernels.spec.block_format import GROUPS, PLANES, BlockFormat

_NAME = re.compile(
    rf"(?:(fp8)|int({'|'.join(map(str, PLANES))}))(?:-g({'|'.join(map(str, GROUPS))}))?(-sym)?(-had)?(?:-ef)?"
)
_INTEGERS = [f"int{bits}" for bits in PLANES]
_FEEDBACK = "-ef"


def parse_format(name: str) -> BlockFormat | None:
    """Parse ``none`` (returns None), ``fp8`` or ``intB`` with B of ``PLANES``, then any of ``-g32 -g64 -sym -had -ef``.

    Raises ValueError for other names. Error feedback (``-ef``) does not change the format.
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
            f"unknown codec {name!r} ({error}); a codec is none, fp8, or {', '.join(_INTEGERS[:-1])} or {_INTEGERS[-1]}, and then "
            "optionally, in this order, -g32 or -g64 (numbers in a group, default 128), -sym (symmetric), -had (rotated), "
            "-ef (error feedback, in flash only), such as int4-g64-had-ef"
        ) from None


def has_feedback(name: str) -> bool:
    return name.endswith(_FEEDBACK)
