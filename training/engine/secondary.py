"""Keeps a copy of the blocks' weights on each node, so that repeated gathers stay inside the node.

Each of the L ranks of a node keeps 1/L of every block: by default the bytes received from other nodes, so later gathers
give the same bits. A copy is valid for one version of the weights; when they change, the next gather crosses nodes
again.

Source: hpZ of ZeRO++, arXiv 2306.10209.
"""

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.collectives.shard_gather import gather_across, gather_inside, gather_node_copy, gather_over_nodes
from tightwire.comm.group.group import Group
from tightwire.training.engine.main_shard import MainShard
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.units import Flat, Unit


def kept_units(options: EngineOptions, blocks: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The blocks that nodes keep copies of."""
    if not options.secondary:
        return ()
    return blocks if options.secondary_blocks is None else blocks[: options.secondary_blocks]


class Secondary:
    """This rank's 1/L of the copies. Cost: ``secondary_bytes`` of each flat, allocated at construction."""

    def __init__(
        self, options: EngineOptions, shards: dict[str, MainShard], units: tuple[Unit, ...], group: Group
    ) -> None:
        self._group = group
        self._codec = None if options.secondary_codec is None else parse_codec(options.secondary_codec)
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        if not units:
            return
        assert group.nodes is not None, "options.check_ranks() was not called"
        self._num_nodes, self._ranks_per_node = group.nodes.across.world_size, group.nodes.inside.world_size
        for flat in (flat for unit in units for flat in unit.flats):
            wire_bytes = shards[flat.name].wire().numel()
            own = secondary_bytes(
                flat, self._num_nodes, self._ranks_per_node, wire_bytes, self._codec, options.compute_dtype
            )
            self._copies[flat.name] = torch.empty(own, dtype=torch.uint8, device=group.device)

    def keeps(self, flat: Flat) -> bool:
        return flat.name in self._copies

    def gather(self, shard: MainShard, out_N: Tensor, room: Tensor) -> None:
        """Fill ``out_N`` with the weights of a flat: from the node's copy if it is current, else across nodes.

        ``room``: as in ``comm.collectives.shard_gather``.
        """
        name = shard.flat.name
        copy = self._copies[name]
        if self._versions.get(name) != shard.version:
            self._bring(shard, copy, out_N, room)
        elif self._codec is None:
            gather_inside(self._group, copy, shard.codec, out_N, room)
        else:
            gather_node_copy(self._group, copy, self._codec, out_N, room)

    def _bring(self, shard: MainShard, copy: Tensor, out_N: Tensor, room: Tensor) -> None:
        name = shard.flat.name
        self._versions.pop(name, None)  # the copy is overwritten from here on
        if self._codec is None:
            gather_across(self._group, shard.wire(), copy)
            gather_inside(self._group, copy, shard.codec, out_N, room)
        else:
            gather_over_nodes(self._group, shard.wire(), shard.codec, out_N, room)
            assert self._group.nodes is not None
            own = out_N.chunk(self._ranks_per_node)[self._group.nodes.inside.rank]
            self._codec.encode(own, copy)
        self._versions[name] = shard.version


def secondary_bytes(
    flat: Flat, num_nodes: int, ranks_per_node: int, wire_bytes: int, codec: Codec | None, dtype: torch.dtype
) -> int:
    """Bytes of a rank's 1/L of a flat whose encoded shard has ``wire_bytes``. ``codec``: of the copy, if any."""
    if codec is None:
        return num_nodes * wire_bytes
    return codec.wire_bytes(flat.num_elems // ranks_per_node, dtype.itemsize)
