"""The situation in which AllReduces run: what a cost, predicted or measured, belongs to."""

import msgspec

ELEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Setting(msgspec.Struct, frozen=True):
    """What a measured time belongs to, beside the algorithm and the size."""

    transport: str
    device: str  # cpu or cuda
    world_size: int
    num_nodes: int
    dtype: str
    link: str = ""  # the emulated wire between the nodes

    @property
    def elem_bytes(self) -> int:
        return ELEM_BYTES[self.dtype]

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        behind = f" behind {self.link}" if self.link else ""
        return f"{self.world_size} ranks{nodes}, {self.dtype} on {self.device} over {self.transport}{behind}"
