"""Parses, formats and compares byte sizes: ``2GiB``, ``512MB``, ``4096``; formats counts and durations; aligns the columns of a table in text."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {prefix: 1024**power for power, prefix in enumerate("KMGT", start=1)}
_BY_LOWER_NAME = {name.lower(): factor for name, factor in _UNITS.items()}


def parse_bytes(text: str) -> int:
    """``1.5GiB`` -> 1610612736, in any case; GB is 10**9, GiB and G are 2**30. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _BY_LOWER_NAME:
        raise ValueError(f"{text!r} is not a size; write it as 2GiB, 512MB or 1048576")
    size = float(match[1]) * _BY_LOWER_NAME[match[2].lower()]
    if size >= 1 << 63:
        raise ValueError(f"{text!r} is more than any machine holds; give less than 8388608TiB, such as 2GiB")
    return int(size)


def parse_memory(text: str) -> int:
    """``parse_bytes`` of an amount of memory. Raises ValueError too for a number without a unit below 1 MiB: a unit is missing."""
    size = parse_bytes(text)
    if size < 1 << 20 and not any(map(str.isalpha, text)):
        raise ValueError(f"{text!r} is {format_bytes(size)}, which holds no model; give it a unit, as in 16GiB")
    return size


def format_bytes(num_bytes: float) -> str:
    """Format in the largest unit of B, KiB, MiB, GiB, TiB that gives 1 or more, with one decimal unless it is zero."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}".removesuffix(".0") + unit


def disk_shortage(folder: Path, num_bytes: int) -> str:
    """What the disk of ``folder`` lacks to hold ``num_bytes`` more, in words; empty if it has room."""
    free = shutil.disk_usage(folder).free
    if free >= num_bytes:
        return ""
    return (
        f"{format_bytes(num_bytes)} are needed and {format_bytes(free)} are free; free {format_bytes(num_bytes - free)}"
    )


def check_disks(needs: Iterable[tuple[str, Path, int, str]], advice: str) -> None:
    """Raises ValueError: a disk has no room for all that shall be written to it; the message ends with ``advice``.

    ``needs``: the option that names a folder, the folder, how many bytes go there, and what they are.
    """
    on_disk: dict[int, list[tuple[str, Path, int, str]]] = {}
    for need in needs:
        on_disk.setdefault(os.stat(need[1]).st_dev, []).append(need)
    for own in on_disk.values():
        key, folder, *_ = own[0]
        if lacking := disk_shortage(folder, sum(num_bytes for _, _, num_bytes, _ in own)):
            what = f"{folder} has no room for {' and '.join(what for *_, what in own)}: {lacking}"
            raise ValueError(f"{key}: {what}, give another `{key}`, {advice}")


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """The rows as lines of columns: the first ``num_left`` columns begin at one place, the others end at one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_count(number: float) -> str:
    """Three significant digits, such as ``12.3k``."""
    for unit in ("", "k"):
        if number < 999.5:  # rounds to three digits
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}M"


def format_millions(count: int) -> str:
    """A number of parameters, such as ``12.3 M`` or ``1.24 B``."""
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit of which it has two, such as ``2.5 h``, or in milliseconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{1e3 * seconds:.0f} ms"
