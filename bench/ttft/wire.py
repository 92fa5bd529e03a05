"""Bytes by formula: what each rank sends for a message, and how many of them cross the wire between nodes."""

from functools import cache

from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.all_reduce.two_shot import two_shot_bytes
from tightwire.comm.group.nodes import in_process_node_groups
from tightwire.comm.protocols import AllReduce


class WireFormulas:
    """The algorithms' own formulas for one group of ranks; nothing is sent.

    Args:
        num_nodes: as the algorithms know them (``--nodes``).
        wire_nodes: what the emulated wire joins: the same, or every rank when there is one node.
    """

    def __init__(self, *, world_size: int, num_nodes: int, wire_nodes: int, elem_bytes: int) -> None:
        self.world_size, self.num_nodes, self.wire_nodes, self.elem_bytes = (
            world_size,
            num_nodes,
            wire_nodes,
            elem_bytes,
        )
        self._groups = in_process_node_groups(world_size, num_nodes)
        self._algorithms = cache(self._make)
        self.sent = cache(self._sent)

    def slack(self, name: str) -> int:
        """Bytes by which what is sent for one message may differ from its share of many: slices are whole groups."""
        codecs = parse_all_reduce(name).codecs
        group = max((codec.group_elems for codec in codecs), default=1)
        return 2 * self.world_size * group * self.elem_bytes

    def crossing(self, name: str, message_bytes: int) -> float:
        """Bytes that one node's end of the wire carries each way for a message of ``message_bytes``.

        With one rank on a node that is what the rank sends. With several, ranks of all-to-all algorithms send alike to all
        others, and of a ring only a node's last rank sends to the next node.
        """
        per_node = self.world_size // self.wire_nodes
        sent = self.sent(name, 0, message_bytes)
        if per_node == 1:
            return sent
        if name.startswith("hierarchical"):
            inside = two_shot_bytes(0, per_node, message_bytes // self.elem_bytes, self.elem_bytes)
            return per_node * (sent - inside)
        if name in ("ring", "native"):
            return sent
        return sent * per_node * (self.world_size - per_node) / (self.world_size - 1)

    def rounds(self, name: str) -> int:
        """Waits for the wire in one message."""
        if name == "one-shot":
            return 1
        return 2 * (self.world_size - 1) if name in ("ring", "native") else 2

    def _sent(self, name: str, rank: int, message_bytes: int) -> int:
        return self._algorithms(name)[rank].wire_bytes(message_bytes // self.elem_bytes, self.elem_bytes)

    def _make(self, name: str) -> list[AllReduce]:
        return [make_all_reduce(name, group) for group in self._groups]
