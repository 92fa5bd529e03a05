"""What a time to first token cannot be less than on a given wire: computing, coding, and the bytes over the bandwidth.

Added up, or where sums travel beside computing the larger of the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tightwire.bench.ttft.proof import Message
from tightwire.bench.ttft.wire import WireFormulas


@dataclass(frozen=True, kw_only=True, slots=True)
class WireUse:
    """What one end of the wire carries each way for one prompt, and how often ranks wait for it."""

    wire_bytes: float
    rounds: int

    def seconds(self, link: Mapping[str, Any]) -> float:
        """On ``link`` as GET /comm describes it, at the rate that was measured."""
        rate = link["measured_bytes_per_s"] or link["asked_bytes_per_s"]
        return (self.wire_bytes / rate if rate else 0.0) + self.rounds * (link["latency_s"] or 0.0)


def wire_use(formulas: WireFormulas, messages: Iterable[Message], gathered_bytes: int) -> WireUse:
    """Of a prompt's AllReduces, and of the gather of its last row's logits, of which each rank sends ``gathered_bytes``."""
    per_node = formulas.world_size // formulas.wire_nodes
    crossing = gathered_bytes * per_node * (formulas.world_size - per_node) / (formulas.world_size - 1)
    rounds = 1
    for message in messages:
        if message.phase == "prefill":
            crossing += formulas.crossing(message.algorithm, message.message_bytes)
            rounds += formulas.rounds(message.algorithm)
    return WireUse(wire_bytes=crossing, rounds=rounds)


def describe_bound(
    use: WireUse,
    link: Mapping[str, Any],
    *,
    compute_s: float,
    codec_s: float | None,
    ttft_s: float,
    overlap: bool = False,
) -> dict[str, float]:
    """The bound and its parts. ``codec_s`` None: coding is inside a fused kernel, and not in the bound.

    ``overlap``: cores and wire work at once, and the slower of them is the bound.
    """
    wire_s, busy_s = use.seconds(link), compute_s + (codec_s or 0.0)
    bound_s = max(wire_s, busy_s) if overlap else wire_s + busy_s
    return {"wire_bytes": use.wire_bytes, "wire_s": wire_s, "bound_s": bound_s, "ttft_over_bound": ttft_s / bound_s}
