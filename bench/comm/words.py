"""What ``bench comm`` calls things, on the terminal and on its page."""

from typing import Any

from tightwire.comm.sizes import format_bytes

COLUMNS = ("us median", "p99", "algbw GB/s", "busbw GB/s", "wire bytes", "rel. error", "x native")


def describe_setting(facts: dict[str, Any]) -> str:
    """Ranks, transport and wire in one line."""
    nodes = f" on {facts['nodes']} nodes" if facts["nodes"] > 1 else ""
    return f"{facts['ranks']} ranks{nodes}, {facts['dtype']}, {facts['transport']}{_describe_link(facts['link'])}"


def cell_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``COLUMNS``."""
    error, speed_up = row["relative_error"], row["speed_up_over_native"]
    return [
        _microseconds(row["seconds"]["p50"]),
        _microseconds(row["seconds"]["p99"]),
        f"{row['algbw_bytes_per_s'] / 1e9:.3f}",
        f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
        f"{row['wire_bytes']:,}",
        "-" if error is None else f"{error:.1e}",
        "-" if speed_up is None else f"{speed_up:.2f}",
    ]


def fault_texts(rows: list[dict[str, Any]]) -> list[str]:
    """Every wrong answer, by name."""
    return [f"{row['algorithm']} at {format_bytes(row['size'])}: {fault}" for row in rows for fault in row["faults"]]


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _describe_link(link: dict[str, Any] | None) -> str:
    if link is None:
        return ""
    measured = link["measured_bytes_per_s"]
    rate = f", which carries {measured * 8 / 1e6:.1f} Mbit/s of payload" if measured else ""
    return f" over {link['name']} ({link['how']}{rate})"
