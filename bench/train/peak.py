"""Measures how much the resident memory of a process grows at its peak. Linux only."""

from pathlib import Path


def reset_peak() -> int | None:
    """Reset the peak. Returns the current resident bytes, or None if not known on this system."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def grown_by(before: int | None) -> int | None:
    """The peak since ``reset_peak``, minus ``before``, which it returned."""
    peak = _status_bytes("VmHWM")
    return None if before is None or peak is None else peak - before


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None
