"""AllReduce kernels on GPUs: ranks as processes that share one, as buffers of one process, and each on its own.

The generic algorithms over gloo, on the CPU, say what every sum must be to the bit.
"""

import os
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport.peer_access import why_unusable
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.store_notes import FactExchange

pytestmark = pytest.mark.gpu

ALGORITHMS = ("one-shot", "two-shot", "flash-int8", "flash-int4", "flash-int5", "flash:int4-had,int8-g32")
SIZES = (1, 4096, 100_003, 1 << 20)
SEND_BYTES, NUM_BLOCKS = 256 << 10, 8  # the longest messages take several launches; all processes' blocks fit a device


def _input(rank: int, num_elems: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * num_elems + 10 * rank + seed)
    return (3 * torch.randn(num_elems, generator=generator)).to(dtype)


def _on_one_device(group: Group, store_path: str) -> Group:
    """``group``, of gloo, with its sums on the first GPU, which all ranks share."""
    from tightwire.comm.transport.peer_memory import PeerAllReduce, map_peer_buffers

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store: Store = FileStore(store_path, group.world_size)
    exchange = FactExchange(store, rank=group.rank, world_size=group.world_size, timeout_s=60.0)
    assert why_unusable(exchange, device) is None
    buffers = map_peer_buffers(exchange, store, device, send_bytes=SEND_BYTES, num_blocks=NUM_BLOCKS)
    transport, sums = copy(group.transport), PeerAllReduce(buffers, timeout_s=60.0, describe=group.ledger.current)
    assert isinstance(transport, ProcessGroupTransport)
    transport.add_fused(sums, sums.check)
    return replace(group, transport=transport, device=device)


def _check_sums(group: Group, store_path: str) -> None:
    on_gpu = _on_one_device(group, store_path)
    for name in ALGORITHMS:
        expected, all_reduce = make_all_reduce(name, group), make_all_reduce(name, on_gpu)
        # Each size here is a kernel of its own, which every rank compiles; the interpreter's tests have all of both types.
        for num_elems, dtype in (*((each, torch.bfloat16) for each in SIZES), (4096, torch.float32)):
            x = _input(group.rank, num_elems, dtype)
            sent_before = on_gpu.transport.bytes_sent
            result = all_reduce(x.cuda())
            assert on_gpu.transport.bytes_sent - sent_before == all_reduce.wire_bytes(num_elems, x.element_size())
            assert torch.equal(result.cpu(), expected(x)), f"{name} {num_elems} {dtype}"
    on_gpu.transport.barrier()


def _check_graphs(group: Group, store_path: str) -> None:
    on_gpu = _on_one_device(group, store_path)
    _check_replays(on_gpu, lambda name: make_all_reduce(name, group))


def _check_replays(on_gpu: Group, expected_of: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    """A captured call is replayed on new numbers, with other calls in between."""
    for name in ("one-shot", "two-shot", "flash-int8"):
        expected, all_reduce = expected_of(name), make_all_reduce(name, on_gpu)
        x = torch.zeros(4096, dtype=torch.bfloat16, device=on_gpu.device)
        all_reduce(x)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = all_reduce(x)
        for seed in range(5):
            mine = _input(on_gpu.rank, 4096, torch.bfloat16, seed)
            x.copy_(mine)
            graph.replay()
            assert torch.equal(result.cpu(), expected(mine)), f"{name}, replay {seed}"
            if seed % 2:
                assert torch.equal(all_reduce(x).cpu(), expected(mine)), f"{name} after replay {seed}"
        on_gpu.transport.barrier()


def _check_eager(on_gpu: Group, expected_of: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    for name in ALGORITHMS:
        for num_elems in SIZES:
            x = _input(on_gpu.rank, num_elems, torch.bfloat16)
            result = make_all_reduce(name, on_gpu)(x.to(on_gpu.device))
            assert torch.equal(result.cpu(), expected_of(name)(x)), f"{name} {num_elems}"
    on_gpu.transport.barrier()


_CHECKS = {"eager": _check_eager, "graph": _check_replays}
_WAYS = {"symmetric memory": "_offer_ipc", "CUDA IPC": "_offer_symmetric"}  # and what is left out then


def _check_beside_nccl(group: Group, store_path: str, way: str, check: str) -> None:
    """Each rank on a GPU of its own: the same bits as the generic algorithms over NCCL."""
    from tightwire.comm.transport import peer_memory

    def refuse(*_: object) -> None:
        raise RuntimeError("left out here")

    setattr(peer_memory, _WAYS[way], refuse)
    device = torch.device("cuda", group.rank)
    torch.cuda.set_device(device)
    topology, store = Topology(group.rank, group.world_size), FileStore(store_path, group.world_size)
    options: dict[str, Any] = {"store": store, "device": device, "timeout_s": 60.0}
    with (
        open_process_group(topology, **options, name="nccl") as plain,
        open_process_group(topology, **options, name="peers", peer_blocks=32) as over_peers,
    ):
        assert over_peers.transport.fused is not None, over_peers.no_peer_memory
        _CHECKS[check](over_peers, lambda name: lambda x: make_all_reduce(name, plain)(x.to(device)).cpu())


@pytest.mark.parametrize("check", [_check_sums, _check_graphs])
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_that_share_a_gpu(world_size: int, check: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(world_size, check, os.fspath(tmp_path / "store"), timeout_s=250.0, collective_timeout_s=120.0)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_simulated_by_one_process(world_size: int, device: torch.device) -> None:
    from helpers.comm.simulated_ranks import ALGORITHMS, SimulatedRanks

    ranks = SimulatedRanks(world_size, device)
    for algorithm in ALGORITHMS:
        for num_bytes in (8192, 1 << 20):
            assert ranks.is_right(algorithm, num_bytes, torch.bfloat16), f"{algorithm} {num_bytes}"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("check", _CHECKS)
@pytest.mark.parametrize("way", _WAYS)
def test_a_gpu_for_each_rank(way: str, check: str, tmp_path: Path) -> None:
    """Peer memory that is refused is a failure: the message says why."""
    world_size = min(8, torch.cuda.device_count())
    run_ranks(world_size, _check_beside_nccl, os.fspath(tmp_path / "store"), way, check, timeout_s=250.0)
