"""Compares arms with each other, on the same link or on a slower one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tightwire.bench.train.arms import ARMS
from tightwire.comm.link.link import parse_link

_Rows = Sequence[dict[str, Any]]


class Finding(NamedTuple):
    """A comparison of two arms. ``ratio``: seconds of ``slower`` / seconds of ``arm``; above 1, ``arm`` is faster."""

    link: str
    arm: str
    slower: str
    slower_link: str
    ratio: float


def find(rows: _Rows) -> list[Finding]:
    """Compare ZeRO++ with zero3, also at four times the bandwidth; sparse sums with dense; and arms with torch's."""
    pairs = [("zero++", "zero3"), ("zero++", "zero3-flat"), ("zero++", "zero3-by-node"), ("zero3", "zero3-on-demand")]
    pairs += [("dgc", "hybrid"), ("top-k", "hybrid"), ("hybrid-quantized", "hybrid")]
    pairs += [
        (arm, peer)
        for peer in ARMS
        if ARMS[peer].peer
        for arm in dict.fromkeys(row["arm"] for row in rows)
        if not ARMS[arm].peer
    ]
    found = []
    by_cell = {(row["link"], row["arm"]): row["seconds"]["p50"] for row in rows}
    links = list(dict.fromkeys(row["link"] for row in rows))
    for arm, slower in pairs:
        found += [
            Finding(link, arm, slower, link, by_cell[link, slower] / by_cell[link, arm])
            for link in links
            if (link, arm) in by_cell and (link, slower) in by_cell
        ]
    for link in links:
        for wider in links:
            is_fourfold = _rate(wider) == 4 * _rate(link)
            if is_fourfold and (link, "zero++") in by_cell and (wider, "zero3") in by_cell:
                ratio = by_cell[wider, "zero3"] / by_cell[link, "zero++"]
                found.append(Finding(link, "zero++", "zero3", wider, ratio))
    return found


def _rate(link: str) -> float:
    return parse_link(link).bytes_per_s or 0.0
