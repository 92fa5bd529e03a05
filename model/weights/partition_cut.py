"""How an image is shared out among the ranks that hold it: equal parts, and a few bytes that everyone keeps; and what moves.

n nodes have R ranks each, W = n R in all. An image of M bytes is cut into W units of u bytes, whole cache lines, in the order
of ``PartitionPlace.index``; what is left, less than W cache lines, is the tail. Each node keeps everything once: a rank keeps
the n units of its place, one part, and the tail. So all messages of an image are equally long, and nothing is padded.

    in every pass, each rank to its node's others     (R-1) n u            M (R-1)/R, but for the tail
    first touch, of what is read in units, each node  R (n-1) u            M (n-1)/n, but for the tail
    first touch, of what is read whole, its reader    (n-1) M              M (n-1)/n on average over the nodes

After the first touch nothing passes between nodes.
"""

from dataclasses import dataclass

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """Of one image."""

    num_bytes: int
    num_nodes: int
    per_node: int

    @property
    def unit_bytes(self) -> int:
        return self.num_bytes // (self.num_nodes * self.per_node * LINE_BYTES) * LINE_BYTES

    @property
    def part_bytes(self) -> int:
        return self.num_nodes * self.unit_bytes

    @property
    def tail_start(self) -> int:
        return self.per_node * self.part_bytes

    @property
    def kept_bytes(self) -> int:
        """By each rank."""
        return self.part_bytes + self.num_bytes - self.tail_start

    @property
    def pass_bytes(self) -> int:
        """That a rank sends to the others of its node whenever the image is put together."""
        return (self.per_node - 1) * self.part_bytes
