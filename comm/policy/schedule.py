"""Rates of a host, and times of what takes turns: parts of a step whose sums overlap, chunks that pass stages.

Imports no torch.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

FEW_ROWS = 16
_STATED = re.compile(r"(\d+(?:\.\d+)?)gb/s,(\d+(?:\.\d+)?)(g|t)flop/s")
_FEW_SHARE, _ATTENTION_SHARE = 0.6, 0.9  # of the rate of products with many rows, where only that is stated


class HostRates(msgspec.Struct, frozen=True):
    """Bytes that one row reads a second, and operations a second of products with few and many rows, and of attention."""

    read: float
    few_flops: float
    many_flops: float
    attention_flops: float

    def __str__(self) -> str:
        return f"{self.read / 1e9:.3g}GB/s,{self.many_flops / 1e9:.3g}GFLOP/s"

    def scaled(self, share: float) -> "HostRates":
        """The rates of a host that is ``share`` times as fast."""
        return HostRates(*(share * rate for rate in msgspec.structs.astuple(self)))

    def seconds(self, num_bytes: float, flops: float, rows: float) -> float:
        """Time of a product of ``flops`` a row with weights of ``num_bytes``."""
        few, many = min(rows, FEW_ROWS) - 1, max(rows - FEW_ROWS, 0)
        return num_bytes / self.read + flops * (few / self.few_flops + many / self.many_flops)


def parse_rates(text: str) -> HostRates:
    """Parse ``50GB/s,300GFLOP/s``: bytes read and operations of products a second. ValueError: another form."""
    found = _STATED.fullmatch(text.lower().replace(" ", ""))
    if found is None or not float(found[1]) or not float(found[2]):
        raise ValueError(f"{text!r} is not a host's speed; write bytes read and operations a second: 50GB/s,300GFLOP/s")
    flops = float(found[2]) * (1e9 if found[3] == "g" else 1e12)
    return HostRates(float(found[1]) * 1e9, _FEW_SHARE * flops, flops, _ATTENTION_SHARE * flops)


def overlapped_s(part_s: float, sums: Iterable[tuple[float, float]]) -> float:
    """Seconds of a pass in two parts, of which one is computed while the sum of the other is on the wire.

    ``part_s``: computing of a part between two sums. ``sums``: computing, on the same cores, and moving of each. A sum has two
    legs, and its computing between them waits until the cores have computed the other part.
    """
    return part_s + sum(2 * (max(part_s, moving_s / 2) + adding_s + moving_s / 2) for adding_s, moving_s in sums)


def staged_s(chunks: Sequence[Sequence[float]], hops_s: Sequence[float], kv_s: Sequence[float]) -> tuple[float, float]:
    """Seconds until the last chunk leaves the last stage, and until all keys and values have come, by each chunk's seconds in
    each stage, on the way to the next, and of its keys and values alone on the wire, of which they share half with hidden states.
    """
    done_s, free_s, queued_s = [0.0] * len(chunks[0]), [0.0] * len(chunks[0]), [0.0] * len(chunks[0])
    for stages_s, hop_s, own_kv_s in zip(chunks, hops_s, kv_s, strict=True):
        arrival_s = 0.0
        for stage, own_s in enumerate(stages_s):
            done_s[stage] = max(done_s[stage], arrival_s) + own_s
            start_s, moving_s = max(done_s[stage], free_s[stage]), hop_s if stage + 1 < len(stages_s) else 0.0
            queued_s[stage] = max(0.0, queued_s[stage] - (start_s - free_s[stage])) + own_kv_s
            shared_s = min(moving_s, queued_s[stage])
            queued_s[stage] -= shared_s
            arrival_s = free_s[stage] = start_s + moving_s + shared_s
    return done_s[-1], max(free + queued for free, queued in zip(free_s, queued_s, strict=True))
