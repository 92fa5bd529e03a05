"""Groups: opening, several at once, closing; on one host, without host names and without noise."""

import os
import secrets
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks, run_ranks
from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.errors import CommError
from tightwire.comm.group import group as groups
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport.socket_join import SocketOptions

CPU = torch.device("cpu")


def _sum(group: Group, value: float) -> float:
    return make_all_reduce("one-shot", group)(torch.tensor([value * 10**group.rank])).item()


def _two_groups_on_one_store(group: Group, path: str) -> tuple[float, float]:
    """The second group has the ranks in reverse, so mixed-up messages would show."""
    store = FileStore(path, group.world_size)
    reverse = group.world_size - 1 - group.rank
    with (
        open_process_group(Topology(group.rank, group.world_size), store=store, device=CPU, name="a") as a,
        open_process_group(Topology(reverse, group.world_size), store=store, device=CPU, name="b") as b,
    ):
        return _sum(a, 1.0), _sum(b, 1.0)


def _reopen(group: Group, path: str) -> list[float]:
    sums = []
    for attempt in range(3):
        store = FileStore(f"{path}-{attempt}", group.world_size)
        with open_process_group(Topology(group.rank, group.world_size), store=store, device=CPU) as again:
            sums.append(_sum(again, 1.0))
    return sums


def _listening_addresses(_: Group) -> set[str]:
    """Local addresses of this process's TCP sockets, from /proc."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue  # the descriptor of the listing itself
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


def _threads_left_after_close(group: Group, path: str) -> int:
    before = _num_threads()
    store = FileStore(path, group.world_size)
    other = open_process_group(Topology(group.rank, group.world_size), store=store, device=CPU)
    _sum(other, 1.0)
    other.close()
    other.close()  # twice is fine
    del other
    return _num_threads() - before


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _are_gloos(_: Group) -> list[bool]:
    """Of this rank's other threads that are batch tasks, whether they are named as gloo's is."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    batch = [task for task in tasks if os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH]
    names = "gloo_tcp_loop\n", Path("/proc/self/comm").read_text()  # with torch 2.11 it has the process's name
    return [(task / "comm").read_text() in names for task in batch]


def test_gloo_does_not_preempt_who_sends() -> None:
    assert run_ranks(2, _are_gloos) == [[True]] * 2


def test_groups_side_by_side_do_not_mix() -> None:
    with Ranks(2) as first, Ranks(3) as second, Ranks(2) as third:
        assert first.run(_sum, 1.0) == [11.0] * 2
        assert second.run(_sum, 2.0) == [222.0] * 3
        assert third.run(_sum, 3.0) == [33.0] * 2
        assert first.run(_sum, 4.0) == [44.0] * 2


def test_two_groups_share_a_store_under_two_names(tmp_path: Path) -> None:
    assert run_ranks(3, _two_groups_on_one_store, str(tmp_path / "store")) == [(111.0, 111.0)] * 3


def test_groups_open_and_close_again_and_again(tmp_path: Path) -> None:
    assert run_ranks(2, _reopen, str(tmp_path / "store")) == [[11.0] * 3] * 2


def test_one_host_talks_over_loopback_only() -> None:
    for addresses in run_ranks(2, _listening_addresses):
        assert addresses == {"0100007F"}  # 127.0.0.1 as the kernel prints it


def test_close_leaves_no_thread(tmp_path: Path) -> None:
    assert run_ranks(2, _threads_left_after_close, str(tmp_path / "store")) == [0, 0]


def test_joins_over_a_tcp_store() -> None:
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sums: dict[int, float] = {}

    def join(rank: int) -> None:
        store = TCPStore("127.0.0.1", hosted.port, timeout=timedelta(seconds=20))
        with open_process_group(Topology(rank, 2), store=store, device=CPU, timeout_s=20.0) as group:
            sums[rank] = _sum(group, 1.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == {0: 11.0, 1: 11.0}


def test_a_group_of_one_needs_nobody(tmp_path: Path) -> None:
    with open_process_group(Topology(0, 1), store=FileStore(str(tmp_path / "store"), 1), device=CPU) as group:
        assert _sum(group, 5.0) == 5.0
        assert group.ledger.counters.counts() == []


def test_refuses_a_device_it_has_no_wire_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        open_process_group(Topology(0, 1), store=FileStore(str(tmp_path / "store"), 1), device=torch.device("meta"))


def test_several_hosts_use_the_interface_towards_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The store is known as localhost, which other hosts cannot reach; without a network there is nothing better.
    try:
        want = groups.source_address(groups._ELSEWHERE)
    except OSError:
        pytest.skip("this machine has no route to any other host")
    assert groups._gloo_address(store, False, None) == {"hostname": want}
    assert groups._gloo_address(store, True, None) == {"hostname": "127.0.0.1"}
    assert groups._gloo_address(store, False, "lo") == {"interface": "lo"}


def test_a_run_from_start_to_end_prints_nothing() -> None:
    program = """
        from harness import run_ranks
        from test_group import _sum
        if __name__ == "__main__":
            assert run_ranks(2, _sum, 1.0) == [11.0, 11.0]
    """
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), str(here.parents[2]), str(here.parents[3] / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("sockets", [None, SocketOptions(b"a secret of many bytes")], ids=["gloo", "sockets"])
def test_a_library_that_cannot_connect_names_its_ports_in_time(
    sockets: SocketOptions | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It connects as the group opens, or beside our own sockets at its first sum; the next sum fails at once."""
    never = threading.Event()
    monkeypatch.setattr(groups, "_make_gloo", lambda *args, **kwargs: never.wait(20))
    monkeypatch.setattr(groups, "host_identity", lambda: secrets.token_hex())  # each rank on its own host
    store = FileStore(str(tmp_path / "store"), 2)
    messages: list[str] = []

    def join(rank: int) -> None:
        options: dict[str, Any] = {"timeout_s": 20, "join_timeout_s": 0.3 if sockets is None else 2.0}
        try:
            group = open_process_group(Topology(rank, 2), store=store, device=CPU, sockets=sockets, **options)
        except CommError as error:
            messages.append(str(error))
            return
        for _ in range(2):
            try:
                make_all_reduce("native", group)(torch.ones(3))
            except CommError as error:
                messages.append(str(error))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    never.set()
    assert len(messages) == (2 if sockets is None else 4)
    assert all("ports that the kernel chooses" in message and "--transport sockets" in message for message in messages)
