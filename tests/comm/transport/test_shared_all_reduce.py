"""AllReduces in one kernel: the bits and the bytes of the same algorithms over messages; what else shares the host."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Ranks, run_ranks
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport.segment import make_segment

NAMES = ("one-shot", "two-shot", "flash-int8", "flash:int4-g32,int8-had", "flash:none,int5-sym", "flash:none,none")
LENGTHS = (1, 63, 1025, 150_001)  # the last: several chunks, in any dtype
DTYPES = (torch.float32, torch.bfloat16)


class _Messages:
    """A transport without its fused AllReduces."""

    fused = None

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _same_as_over_messages(group: Group) -> None:
    messages: Any = _Messages(group.transport)
    for name in NAMES:
        fused, plain = make_all_reduce(name, group), make_all_reduce(name, replace(group, transport=messages))
        for num_elems in LENGTHS:
            for dtype in DTYPES:
                generator = torch.Generator().manual_seed(num_elems * group.world_size + group.rank)
                x = torch.randn(num_elems, generator=generator).mul(3).to(dtype)
                sent = [group.transport.bytes_sent]
                got = fused(x)
                sent.append(group.transport.bytes_sent)
                want = plain(x)
                sent.append(group.transport.bytes_sent)
                case = f"{name} {num_elems} {dtype}"
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), case
                assert sent[1] - sent[0] == sent[2] - sent[1] == fused.wire_bytes(num_elems, x.element_size()), case


def test_the_bits_and_bytes_of_the_algorithm_over_messages() -> None:
    run_ranks(3, _same_as_over_messages, shared_memory=True)


def _two_groups(group: Group, port: int) -> None:
    """A second group of the same ranks over a segment of its own, its calls between those of the first."""
    fd = make_segment(group.world_size) if group.rank == 0 else -1
    where = torch.tensor([os.getpid(), fd]).view(torch.uint8)
    pid, fd = group.transport.gather(where)[0].view(torch.int64).tolist()
    store = TCPStore("127.0.0.1", port, is_master=False)
    with open_process_group(
        Topology(group.rank, group.world_size),
        store=store,
        device=torch.device("cpu"),
        timeout_s=group.timeout_s,
        name="second",
        segment_fd=os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR),
    ) as second:
        arms = [make_all_reduce("one-shot", group), make_all_reduce("two-shot", second)]
        total = sum(range(1, group.world_size + 1))
        for call in range(60):
            arm = arms[call % 3 % 2]
            assert arm(torch.full((288,), float((group.rank + 1) * call)))[0] == total * call
    for _ in range(10):  # the first goes on without the second
        assert arms[0](torch.ones(3))[0] == group.world_size
    with pytest.raises(CommError, match="this group is closed"):
        arms[1](torch.ones(3))


def test_groups_do_not_meet() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(3, _two_groups, store.port, shared_memory=True)


def _too_small_for_flash(group: Group) -> None:
    with pytest.raises(ValueError, match="needs 512 bytes in a buffer of the segment, which has 192"):
        make_all_reduce("flash:none,int8", group)(torch.ones(1000, dtype=torch.float16))


def test_a_segment_too_small_for_flash_is_refused() -> None:
    with Ranks(2, shared_memory=True, chunk_bytes=192) as ranks:
        ranks.run(_too_small_for_flash)
