"""Peer buffers of CPU ranks, whose kernels run in Triton's interpreter: a file that all ranks map."""

import mmap

import torch

from tightwire.kernels.cuda.all_reduce import PeerBuffers, buffer_bytes

_PAGE = mmap.PAGESIZE


def shared_file_bytes(world_size: int, send_bytes: int, num_blocks: int) -> int:
    """Size of the file for ``shared_peer_buffers``."""
    return world_size * _padded_bytes(world_size, send_bytes, num_blocks)


def shared_peer_buffers(fd: int, *, rank: int, world_size: int, send_bytes: int, num_blocks: int) -> PeerBuffers:
    """Peer buffers in a file that all ranks map, initially zero."""
    memory = mmap.mmap(fd, shared_file_bytes(world_size, send_bytes, num_blocks))
    view = torch.frombuffer(memory, dtype=torch.uint8)
    step = _padded_bytes(world_size, send_bytes, num_blocks)
    return PeerBuffers(
        addresses=torch.arange(world_size) * step + view.data_ptr(),
        rank=rank,
        send_bytes=send_bytes,
        num_blocks=num_blocks,
        failure=torch.zeros(1, dtype=torch.int32),
        memory=view,
    )


def _padded_bytes(world_size: int, send_bytes: int, num_blocks: int) -> int:
    return -(-buffer_bytes(send_bytes, num_blocks, world_size) // _PAGE) * _PAGE
