import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tightwire.comm.link import emulated_network, link
from tightwire.comm.link.emulated_network import EmulatedNetwork, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    try:
        made = EmulatedNetwork(parse_link("80mbit"))
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")
    with made:
        yield made


def _folders(pid: int) -> list[Path]:
    return list(Path("/run").glob(f"tightwire-{pid}-*"))


def _interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_the_rate_of_a_very_slow_link_is_measured(network: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_DEADLINE_S", 5.0)  # less than a MiB takes at this rate
    with EmulatedNetwork(parse_link("256kbit")) as slow:
        measured = slow.measure(0.3)

    assert measured == pytest.approx(32e3, rel=0.5)


def test_no_byte_passes_faster_than_the_rate(network: EmulatedNetwork) -> None:
    num_bytes, bucket_bytes = 2 << 20, 68 << 10
    rate = network.link.bytes_per_s
    assert rate is not None
    first, second = network.nodes
    with first.visit(lambda: socket.create_server((first.address, 0))) as listener:
        place = listener.getsockname()
        with (
            second.visit(lambda: socket.create_connection(place, timeout=60)) as caller,
            listener.accept()[0] as accepted,
        ):
            start = time.monotonic()
            sender = threading.Thread(target=caller.sendall, args=(bytes(num_bytes),))
            sender.start()
            left = num_bytes
            while left:
                left -= len(accepted.recv(min(left, 1 << 16)))
            seconds = time.monotonic() - start
            sender.join()

    assert seconds >= (num_bytes - bucket_bytes) / rate


def test_the_rate_is_measured_and_what_was_made_for_it_is_gone(network: EmulatedNetwork) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()

    rates = [network.measure(seconds=0.1) for _ in range(2)]

    assert min(rates) > 0
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_node_is_not_on_the_machines_own_network(network: EmulatedNetwork) -> None:
    first, second = network.nodes

    shown = first.visit(lambda: subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout)

    assert "wire0" in shown and first.address in shown and second.address not in shown
    assert "wire0" not in _interfaces() and "port0" not in _interfaces()


def test_processes_of_one_node_do_not_pass_the_wire(network: EmulatedNetwork) -> None:
    first = network.nodes[0]

    def send_to_itself() -> int:
        before = _sent_over(first.interface)
        with (
            socket.create_server((first.address, 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=60) as caller,
            listener.accept()[0],
        ):
            caller.sendall(bytes(1 << 18))
        return _sent_over(first.interface) - before

    assert first.visit(send_to_itself) < 1 << 12


def _sent_over(interface: str) -> int:
    """Bytes that left through an interface of this thread's node."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:")


def test_a_thread_enters_a_node_alone(network: EmulatedNetwork) -> None:
    own = os.stat("/proc/thread-self/ns/net").st_ino

    inside = network.nodes[0].visit(lambda: os.stat("/proc/thread-self/ns/net").st_ino)

    assert inside == os.stat(f"/proc/{network.nodes[0].pid}/ns/net").st_ino != own
    assert os.stat("/proc/thread-self/ns/net").st_ino == own


def test_what_a_visit_raises_reaches_the_caller(network: EmulatedNetwork) -> None:
    with pytest.raises(ZeroDivisionError):
        network.nodes[0].visit(lambda: 1 // 0)


def test_three_nodes_reach_each_other_and_nothing_stays(network: EmulatedNetwork) -> None:
    before = _interfaces()
    with EmulatedNetwork(parse_link("1gbit"), num_nodes=3) as three:
        listener = three.nodes[2].visit(lambda: socket.create_server((three.nodes[2].address, 0)))
        with listener:
            place = listener.getsockname()
            caller = three.nodes[0].visit(lambda: socket.create_connection(place, timeout=60))
            caller.close()
        assert three.folder in _folders(os.getpid())
    assert not any(_is_alive(node.pid) for node in three.nodes)
    assert _folders(os.getpid()) == [network.folder]  # the fixture's own
    assert _interfaces() == before


_MAKER = """
import sys, time
from tightwire.comm.link.emulated_network import EmulatedNetwork
from tightwire.comm.link.link import parse_link
network = EmulatedNetwork(parse_link("1gbit"))
print(network._switch.pid, *(node.pid for node in network.nodes), flush=True)
time.sleep(60)
"""


def _start_maker() -> tuple[subprocess.Popen[str], list[int]]:
    """A process with a network, and the processes that hold its namespaces."""
    maker = subprocess.Popen([sys.executable, "-c", _MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    return maker, [int(word) for word in maker.stdout.readline().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _end(maker: subprocess.Popen[str]) -> None:
    maker.kill()
    maker.wait(10)
    assert maker.stdout is not None
    maker.stdout.close()


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.005)


def test_a_killed_process_leaves_nothing_behind(network: EmulatedNetwork) -> None:
    maker, holders = _start_maker()
    assert len(holders) == 3 and all(map(_is_alive, holders))
    (folder,) = _folders(maker.pid)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "socket").touch()

    _end(maker)

    _wait_until(lambda: not any(map(_is_alive, holders)) and not _folders(maker.pid))


def test_a_process_killed_while_it_makes_a_network_leaves_nothing(network: EmulatedNetwork, tmp_path: Path) -> None:
    begun, slow = tmp_path / "begun", tmp_path / "ip"
    slow.write_text(f'#!/bin/sh\n[ "$2" = add ] && touch {begun} && sleep 0.2\nexec {shutil.which("ip")} "$@"\n')
    slow.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    maker = subprocess.Popen([sys.executable, "-c", _MAKER], stdout=subprocess.PIPE, text=True, env=environment)
    _wait_until(begun.exists)
    holders = _children(maker.pid)
    assert holders

    _end(maker)

    _wait_until(lambda: not any(map(_is_alive, holders)) and not _folders(maker.pid))


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_a_step_that_fails_is_told_and_undone(network: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _folders(os.getpid())
    real_run = emulated_network._run
    monkeypatch.setattr(
        emulated_network, "_run", lambda *command: real_run(*("false" if word == "tc" else word for word in command))
    )

    with pytest.raises(NoEmulatedNetworkError, match="failed"):
        EmulatedNetwork(parse_link("1gbit"))

    assert _folders(os.getpid()) == before


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(NoEmulatedNetworkError, match=r"only root makes network namespaces; run as root"):
        EmulatedNetwork(parse_link("1gbit"))


def test_one_node_is_no_network() -> None:
    with pytest.raises(ValueError, match="2 to 64 nodes, got 1"):
        EmulatedNetwork(parse_link("1gbit"), num_nodes=1)
