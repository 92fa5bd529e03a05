"""AllReduces over peer memory: GPU kernels in Triton's interpreter, in processes that map each other's buffers.

Several processes run one kernel each, which wait at their barriers. Results and counts are compared with the generic
algorithms over gloo, bit for bit.
"""

import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRanks, needs_triton
from torch import Tensor
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import split_name
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.errors import CollectiveTimeoutError
from tightwire.comm.group.group import Group
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.store_notes import FactExchange

pytestmark = needs_triton

NUM_BLOCKS = 2
SEND_BYTES = 8192  # so that the longer messages below take several launches

# name, numbers, dtype
CASES = [
    ("one-shot", 1, torch.float32),
    ("one-shot", 5003, torch.bfloat16),
    ("two-shot", 1000, torch.float16),
    ("two-shot", 5003, torch.bfloat16),
    ("flash-int8-plain", 1, torch.float32),
    ("flash-int8-plain", 9001, torch.bfloat16),
    ("flash-int3", 700, torch.float32),
    ("flash:int4-had,int8-g32-ef", 700, torch.bfloat16),
    ("flash:int3-sym,none", 700, torch.bfloat16),
    ("flash:none,int8", 700, torch.float16),
]
# The interpreter is slow, and where processes outnumber the cores their kernels wait for each other's time slices.
FEW_CASES = [
    ("one-shot", 1100, torch.bfloat16),
    ("two-shot", 1001, torch.bfloat16),
    ("flash-int8-plain", 1001, torch.bfloat16),
    ("flash-int4", 1001, torch.bfloat16),
]


@contextmanager
def _shared_file(world_size: int) -> Iterator[str]:
    """The path of a new file for peer buffers, as other processes find it."""
    from tightwire.kernels.cuda.barrier import header_bytes

    fd = os.memfd_create("tightwire-peer-buffers")
    try:
        os.ftruncate(fd, world_size * (header_bytes(NUM_BLOCKS, world_size) + 3 * SEND_BYTES + (1 << 16)))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _over_peer_memory(group: Group, path: str, timeout_s: float = 60.0) -> tuple[Group, Tensor]:
    """``group`` with its transport over peer memory, and the header of this rank's buffer."""
    from helpers.comm.shared_peer_buffers import shared_peer_buffers

    from tightwire.comm.transport.peer_memory import PeerAllReduce
    from tightwire.kernels.cuda.barrier import header_bytes

    rank, world_size = group.rank, group.world_size
    buffers = shared_peer_buffers(
        os.open(path, os.O_RDWR), rank=rank, world_size=world_size, send_bytes=SEND_BYTES, num_blocks=NUM_BLOCKS
    )
    transport, sums = copy(group.transport), PeerAllReduce(buffers, timeout_s=timeout_s, describe=group.ledger.current)
    assert isinstance(transport, ProcessGroupTransport)
    transport.add_fused(sums, sums.check)
    assert isinstance(buffers.memory, Tensor)
    start = int(buffers.addresses[rank]) - buffers.memory.data_ptr()
    header = buffers.memory[start : start + header_bytes(NUM_BLOCKS, world_size)].view(torch.int32)
    return replace(group, transport=transport), header


def _input(rank: int, num_elems: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * num_elems + rank)
    return (3 * torch.randn(num_elems, generator=generator)).to(dtype)


def _check_sums(group: Group, path: str, cases: list[tuple[str, int, torch.dtype]]) -> None:
    over_peers, header = _over_peer_memory(group, path)
    for name, num_elems, dtype in cases:
        case = f"{name} {num_elems} {dtype}"
        x = _input(group.rank, num_elems, dtype)
        all_reduce = make_all_reduce(name, over_peers)
        sent_before = over_peers.transport.bytes_sent
        feedback, generic_feedback = Feedback(), Feedback()
        result = all_reduce(x, feedback=feedback)
        sent = over_peers.transport.bytes_sent - sent_before
        generic = make_all_reduce(name, group)
        assert torch.equal(result, generic(x, feedback=generic_feedback)), f"{case}: not the generic algorithm's bits"
        if "-ef" in "".join(split_name(name)[1]):
            again = all_reduce(x, feedback=feedback)
            assert torch.equal(again, generic(x, feedback=generic_feedback)), f"{case}: other errors are carried"
            assert not torch.equal(again, result), f"{case}: no errors are carried"
        assert sent == all_reduce.wire_bytes(num_elems, x.element_size()), f"{case}: sent {sent}"
        assert torch.equal(x, _input(group.rank, num_elems, dtype)), f"{case}: input changed"
    hidden = {count.algorithm for count in group.ledger.counters.counts() if count.codec_seconds is None}
    assert hidden == {name for name, *_ in cases if name.startswith("flash")}, "one kernel does not tell coding apart"
    square = _input(group.rank, 36, torch.float32).view(6, 6).t()
    for name in ("one-shot", "flash-int8"):
        result = make_all_reduce(name, over_peers)(square)
        assert result.is_contiguous() and torch.equal(result, make_all_reduce(name, group)(square)), name
    dead, calls, meetings = int(header[0]), header[1 : 1 + NUM_BLOCKS], header[1 + NUM_BLOCKS : 1 + 2 * NUM_BLOCKS]
    arrivals = header[1 + 2 * NUM_BLOCKS :][: NUM_BLOCKS * group.world_size].view(NUM_BLOCKS, -1)
    assert dead == 0 and bool((calls == calls[0]).all()) and int(calls[0]) >= len(cases)
    assert bool((arrivals == meetings[:, None]).all()), "a barrier's numbers differ at rest"


def _check_messages(group: Group, path: str) -> None:
    """What is not an AllReduce goes to the library, and is counted once."""
    transport = _over_peer_memory(group, path)[0].transport
    mine = torch.full((10,), group.rank, dtype=torch.uint8)
    assert [int(buf[0]) for buf in transport.gather(mine)] == list(range(group.world_size))
    assert [int(buf[0]) for buf in transport.exchange([mine] * group.world_size)] == list(range(group.world_size))
    assert int(transport.shift(mine)[0]) == (group.rank - 1) % group.world_size
    assert transport.bytes_sent == (2 * (group.world_size - 1) + 1) * 10
    assert torch.equal(transport.all_reduce(torch.ones(6)), torch.full((6,), float(group.world_size)))
    transport.barrier()


def _miss_one(group: Group, first_path: str, path: str) -> str | None:
    """Rank 1 stays away from a call, after all have come to one with more patience and know the kernel."""
    make_all_reduce("two-shot", _over_peer_memory(group, first_path)[0])(torch.ones(100))
    over_peers, _ = _over_peer_memory(group, path, timeout_s=1.5)
    all_reduce = make_all_reduce("two-shot", over_peers)
    over_peers.transport.barrier()
    if group.rank == 1:
        return None
    with pytest.raises(
        CollectiveTimeoutError, match=r"timed out waiting for rank 1 of 3 in all_reduce two-shot 400 B"
    ) as raised:
        all_reduce(torch.ones(100))
    assert raised.value.ranks == (1,)
    with pytest.raises(CollectiveTimeoutError):
        over_peers.transport.gather(torch.ones(1, dtype=torch.uint8))
    return str(raised.value)


def _check_messages_and_sums(
    group: Group, messages_path: str, sums_path: str, cases: list[tuple[str, int, torch.dtype]]
) -> None:
    _check_messages(group, messages_path)
    _check_sums(group, sums_path, cases)


def _opened(place: int, *args: int) -> Tensor:
    """What torch's ``rebuild_cuda_tensor`` is told, (index, device)."""
    return torch.tensor([place, args[5]])


class _OtherRank:
    """An exchange with rank 1, whose memory lies on its own device."""

    rank, world_size = 0, 2

    def share(self, topic: str, fact: bytes) -> list[bytes]:
        return [fact, pickle.dumps((_opened, (1, 0, 0, 0, 0, 0, 1, 0)))]


def test_memory_of_another_gpu_is_opened_for_the_device_that_reads_it() -> None:
    from tightwire.comm.transport.peer_memory import _join_ipc

    exchange: Any = _OtherRank()
    views, _ = _join_ipc(exchange, torch.device("cuda", 0), (torch.zeros(16), b""))
    assert views[1].tolist() == [1, 0], "opened under device 1, this rank's kernels may not touch it"


@pytest.mark.parametrize("fault", ["no memory", "no handles", "no end"])
def test_a_way_that_one_rank_cannot_go_is_left_by_all(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They learn why at once or, where rank 1 stays in torch's rendezvous, before they give each other up."""
    from tightwire.comm.transport import peer_memory

    device, stores, of_thread = torch.device("cuda", 0), dict[int, Store](), threading.local()
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def fail(of: str) -> None:
        if of_thread.rank and fault == of:
            raise RuntimeError(f"{of}\nand more")

    class Symmetric:
        def empty_strided_p2p(self, *_: object) -> Tensor:
            fail("no memory")
            return torch.full((1,), of_thread.rank)

        def set_group_info(self, name: str, rank: int, world_size: int, store: Store) -> None:
            stores[rank] = store

        def rendezvous(self, own: Tensor) -> Any:
            if fault == "no end" and int(own):
                stores[1].get("what nobody writes")
            return SimpleNamespace(get_buffer=lambda *_: None)

    def map_on(rank: int) -> object:
        store = TCPStore("127.0.0.1", first.port, wait_for_workers=False, timeout=timedelta(seconds=10))
        exchange = FactExchange(store, rank=rank, world_size=2, timeout_s=2.0)
        of_thread.rank = rank

        def join(own: Tensor) -> Any:
            fail("no handles")
            return peer_memory._join_symmetric(exchange, device, own)

        offer = partial(peer_memory._offer_symmetric, exchange, store, device)
        return peer_memory._map(peer_memory._Way("a way", offer, join), 16, exchange, device)

    monkeypatch.setattr(peer_memory, "_symmetric", Symmetric)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(map_on, range(2)))
    first.set("what nobody writes", "")
    said = "torch's rendezvous did not end in 1 s" if fault == "no end" else fault
    assert found == [(None, f"rank 1: {said}")] * 2


@pytest.mark.parametrize("fault", ["none", "lost writes", "stale reads"])
def test_mapped_memory_is_written_and_read_before_it_is_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks: what one writes must be there in its own view, and in the view that the other has of it."""
    from tightwire.comm.transport.peer_memory import _verify

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    buffers = torch.zeros(2, 64, dtype=torch.uint8)
    views = [[buffers[0], buffers[1]], [buffers[0], buffers[1]]]
    if fault == "lost writes":
        views[0][1] = buffers[1].clone()
    elif fault == "stale reads":  # rank 1's own writes arrive, and it sees nothing that others write there
        stale = buffers[0].clone()
        views[1][0] = stale
        stale.fill_ = lambda value: stale  # pyright: ignore[reportAttributeAccessIssue]
    meet = threading.Barrier(2)

    class Exchange:
        world_size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def share(self, topic: str, fact: bytes) -> list[bytes]:
            meet.wait(10.0)
            return []

    def verify(rank: int) -> str | None:
        exchange: Any = Exchange(rank)
        return _verify(views[rank], exchange, "a way", torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(verify, range(2)))
    assert (found == [None, None]) == (fault == "none"), found


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[InterpretedRanks]:
    ranks = InterpretedRanks(3)
    yield ranks
    ranks.close()


def test_messages_of_two_are_the_librarys_and_sums_the_generic_algorithms() -> None:
    ranks = InterpretedRanks(2)
    with _shared_file(2) as messages_path, _shared_file(2) as sums_path:
        ranks.run(_check_messages_and_sums, messages_path, sums_path, CASES)
    ranks.close()


def test_messages_of_three_are_the_librarys_and_sums_the_generic_algorithms(three_ranks: InterpretedRanks) -> None:
    with _shared_file(3) as messages_path, _shared_file(3) as sums_path:
        three_ranks.run(_check_messages_and_sums, messages_path, sums_path, FEW_CASES)


def test_a_missing_rank_ends_in_an_error_that_names_it(three_ranks: InterpretedRanks) -> None:
    with _shared_file(3) as first_path, _shared_file(3) as path:
        messages = three_ranks.run(_miss_one, first_path, path)
    assert messages[1] is None and all(
        "Results since then are NaN" in message for message in (messages[0], messages[2])
    )
