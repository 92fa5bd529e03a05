"""All ranks learn of one rank's objection to peer memory; the check of peer writes reports wrong values."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, renumbered
from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport import peer_access
from tightwire.comm.transport.peer_access import (
    add_peer_memory,
    check_peer_writes,
    claimed_peers,
    host_identity,
    why_unusable,
)
from tightwire.comm.transport.process_group import GlooTransport
from tightwire.comm.transport.store_notes import FactExchange, FailureNotes

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def _exchange(path: Path, rank: int, world_size: int, timeout_s: float = 30.0) -> FactExchange:
    return FactExchange(
        FileStore(str(path / "store"), world_size), rank=rank, world_size=world_size, timeout_s=timeout_s
    )


def test_all_ranks_hear_the_first_objection(tmp_path: Path) -> None:
    def decide(rank: int) -> tuple[list[bytes], str | None, str | None]:
        exchange = _exchange(tmp_path, rank, 3)
        facts = exchange.share("facts", bytes([rank, 0, 10]))
        objection = exchange.first_objection("hot", f"it is hot at {rank}" if rank else None)
        return facts, objection, exchange.first_objection("cold", None)

    with ThreadPoolExecutor(3) as pool:
        decided = list(pool.map(decide, range(3)))
    assert decided == [([b"\0\0\n", b"\1\0\n", b"\2\0\n"], "rank 1: it is hot at 1", None)] * 3


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(CollectiveTimeoutError, match="ranks 1 and 2 of 3 did not") as raised:
        _exchange(tmp_path, 0, 3, timeout_s=0.2).share("facts", b"")
    assert raised.value.ranks == (1, 2)


def test_a_cpu_rank_objects(tmp_path: Path) -> None:
    reason = why_unusable(_exchange(tmp_path, 0, 1), CPU)
    assert reason == "rank 0: peer memory is between GPUs, and its device is cpu"


def test_missing_triton_and_old_gpus_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access, "find_spec", lambda name: None)
    assert "Triton is not installed" in (peer_access._own_objection(2, GPU) or "")
    monkeypatch.setattr(peer_access, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert "T4 is too old" in (peer_access._own_objection(2, GPU) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "32 ranks" in (peer_access._own_objection(32, GPU) or "")
    assert peer_access._own_objection(31, GPU) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ([(host_identity(), "a"), (host_identity(), "a")], None),  # ranks that share a GPU
        ([(host_identity(), "a"), (host_identity(), "")], None),  # that rank says itself what is wrong
        ([(host_identity(), "a"), ("elsewhere", "b")], "rank 1 is on another host"),
        ([(host_identity(), "a"), (host_identity(), "c")], "rank 1's GPU is not visible to it"),
        ([(host_identity(), "a"), (host_identity(), "b")], "no access from its GPU to rank 1's"),
    ],
)
def test_what_cuda_tells_of_the_peers(
    monkeypatch: pytest.MonkeyPatch, facts: list[tuple[str, str]], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    found = peer_access._objection_to_peers(GPU, facts)
    assert found is None if reason is None else reason in (found or "")


def test_the_library_is_kept_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    notes = FailureNotes(store, 0, 1)
    library = GlooTransport(None, notes, rank=0, world_size=1, device=CPU, timeout_s=1.0)
    reason = add_peer_memory(library, store, 32)
    assert library.fused is None
    assert reason.startswith("rank 0: peer memory is between GPUs")
    assert "not through peer memory: rank 0: peer memory is between GPUs" in caplog.text


def test_a_failed_library_tells_the_numbers_that_its_group_was_given() -> None:
    notes: Any = SimpleNamespace(blame=lambda own, timeout_s: ({1}, {}))
    library = GlooTransport(None, notes, rank=0, world_size=2, device=CPU, timeout_s=1.0)
    library.numbered = partial(renumbered, ranks=(0, 2), where="in stages", rank=0, world_size=4)
    error = library._failed(RuntimeError("connection reset"))
    assert error.ranks == (2,)
    assert str(error).startswith(
        "rank 0 lost rank 2 of 4 in stages; from here on ranks 0, 2 are numbered from 0: lost rank 1"
    )


def test_peer_memory_of_cpu_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="peer memory is between GPUs, got device cpu"):
        open_process_group(Topology(0, 1), store=FileStore(str(tmp_path / "store"), 1), device=CPU, peer_blocks=32)


CPU = torch.device("cpu")


def test_what_arrives_whole_passes_with_its_speed() -> None:
    check = check_peer_writes(CPU, CPU)
    assert check.ok and check.gb_per_s is not None and check.gb_per_s > 0


def test_what_is_lost_is_counted_and_not_timed() -> None:
    def lose_the_end(target_N: Tensor, source_N: Tensor) -> None:
        target_N[:-7].copy_(source_N[:-7])

    check = check_peer_writes(CPU, CPU, copy=lose_the_end)
    assert check == (False, "copy engine: 7 of 1048576 values arrived wrong", None)


def test_a_kernels_stores_are_looked_at_apart() -> None:
    def garble_strided(target_N: Tensor, source_N: Tensor) -> None:
        target_N.copy_(source_N if target_N.is_contiguous() else source_N ^ 1)

    check = check_peer_writes(CPU, CPU, copy=garble_strided)
    assert not check.ok and check.detail.startswith("kernel stores: 1048576 of")


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_claimed_peers_hold_what_is_written() -> None:
    for writer, owner in claimed_peers():
        check = check_peer_writes(torch.device("cuda", writer), torch.device("cuda", owner))
        assert check.ok, check.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_holds_what_it_writes_itself() -> None:
    assert check_peer_writes(torch.device("cuda", 0), torch.device("cuda", 0)).ok
