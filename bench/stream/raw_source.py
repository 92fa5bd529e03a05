"""Moves a pass's bytes without the streaming pipeline: plain copies, plain reads, or bare gathers.

There is no decoding, no buffer pool and no other thread, so the difference to a fetch is the pipeline's cost.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tightwire.comm.buffers import page_aligned
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.model.weights.layer_store import LayerStore
from tightwire.model.weights.partition_store import PartitionCut
from tightwire.model.weights.prepared.manifest import Blob

RawPass = Callable[[], None]


def raw_copies(store: LayerStore, order: Sequence[int], device: torch.device) -> RawPass:
    """Copies from a store in host memory to ``device``."""
    target = torch.empty(max(store.packed(layer).num_bytes for layer in order), dtype=torch.uint8, device=device)
    nowhere = torch.empty(0, dtype=torch.uint8)

    def run() -> None:
        for layer in order:
            target[: store.packed(layer).num_bytes].copy_(store.read(layer, nowhere, lambda num_bytes: None))

    return run


@contextmanager
def raw_reads(path: Path, blobs: Sequence[Blob], *, direct: bool) -> Iterator[RawPass]:
    """Reads of a file's blobs, one after the other, each with one call if the system allows it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    view = page_aligned(max(blob.num_bytes for blob in blobs), torch.device("cpu")).numpy().data

    def run() -> None:
        for blob in blobs:
            done = 0
            while done < blob.num_bytes:
                got = os.preadv(fd, [view[done : blob.num_bytes]], blob.offset + done)
                if got == 0:
                    raise ValueError(f"{path} ends inside a layer; was it truncated since it was prepared?")
                done += got

    try:
        yield run
    finally:
        os.close(fd)


def raw_gathers(peers: PartitionPeers, layer_bytes: Sequence[int]) -> RawPass:
    """The messages of a pass between the replicas; all of them run it together."""
    cuts = [PartitionCut(num_bytes, peers.at.per_node) for num_bytes in layer_bytes]
    part = torch.ones(max(cut.part_bytes for cut in cuts), dtype=torch.uint8)
    out = torch.zeros(max(cut.tail_start for cut in cuts), dtype=torch.uint8)

    def run() -> None:
        for cut in cuts:
            peers.inside.transport.gather_into(part[: cut.part_bytes], out[: cut.tail_start])

    return run
