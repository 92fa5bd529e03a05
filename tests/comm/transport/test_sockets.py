"""Our own sockets between network namespaces: cut links end in errors that name the rank, and little is sent beyond the payload."""

import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import Ranks, run_ranks
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.errors import CollectiveMismatchError, CommError
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.emulated_network import WIRE, EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link
from tightwire.comm.transport import sockets
from tightwire.comm.transport.socket_join import SocketOptions
from tightwire.comm.transport.sockets import FRAME_BYTES, HEADER_BYTES, interface_bytes
from tightwire.kernels.cpu.library import available

_DEAD_LINK_S = 3.0
needs_kernels = pytest.mark.skipif(not available(), reason="no compiled kernels")


class Cut(NamedTuple):
    """What a rank saw of a cut link."""

    error: str
    ranks: tuple[int, ...]
    message: str
    at_s: float


@pytest.fixture
def network() -> Iterator[EmulatedNetwork]:
    try:
        opened = EmulatedNetwork(parse_link("1gbit"))
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")
    with opened:
        yield opened


def _join(group: Group, node: EmulatedNode, store: str) -> Group:
    """Move this process to ``node`` and open a group over sockets between the nodes."""
    node.enter()
    return open_process_group(
        Topology(group.rank, 2),
        store=FileStore(store, 2),
        device=torch.device("cpu"),
        timeout_s=60.0,
        interface=WIRE,
        sockets=SocketOptions(dead_s=_DEAD_LINK_S),
    )


def _sum_until_cut(group: Group, nodes: tuple[EmulatedNode, ...], store: str, *, absent_s: float = 0.0) -> Cut | None:
    """Sum until a link fails. With ``absent_s`` rank 1 only sleeps, so rank 0 waits with nothing in flight."""
    with _join(group, nodes[group.rank], store) as between:
        Path(f"{store}.{group.rank}").touch()
        if absent_s and group.rank == 1:
            time.sleep(absent_s)
            return None
        all_reduce = make_all_reduce("one-shot", between)
        try:
            while True:
                all_reduce(torch.ones(288))
        except CommError as error:
            return Cut(type(error).__name__, error.ranks, str(error), time.monotonic())


def _wait_quietly(group: Group, nodes: tuple[EmulatedNode, ...], store: str) -> Cut | None:
    return _sum_until_cut(group, nodes, store, absent_s=15.0)


_DOWN = ("ip", "link", "set", WIRE, "down")
# Frames to an address that no host has are lost; the other direction works.
_ONE_WAY = ("ip", "neigh", "replace", "10.0.0.1", "lladdr", "02:00:00:00:00:99", "dev", WIRE, "nud", "permanent")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fn", "command", "seen_by"),
    [(_sum_until_cut, _DOWN, [0, 1]), (_sum_until_cut, _ONE_WAY, [0, 1]), (_wait_quietly, _DOWN, [0])],
    ids=["link-down", "one-way-loss", "link-down-while-idle"],
)
def test_a_cut_link_is_noticed_within_seconds(
    fn: Callable[..., Cut | None],
    command: tuple[str, ...],
    seen_by: list[int],
    network: EmulatedNetwork,
    tmp_path: Path,
) -> None:
    store, cut_at = f"{tmp_path}/store", list[float]()

    def cut() -> None:
        while not all(Path(f"{store}.{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        time.sleep(0.3)
        network.nodes[1].run(*command)
        cut_at.append(time.monotonic())

    with Ranks(2) as ranks, ThreadPoolExecutor(1) as cutter:
        cutting = cutter.submit(cut)
        outcomes = ranks.outcomes(fn, network.nodes, store, enough=len(seen_by), timeout_s=40)
        cutting.result()
        ranks.kill()

    assert sorted(outcomes) == seen_by
    for rank, seen in outcomes.items():
        assert isinstance(seen, Cut), seen
        assert (seen.error, seen.ranks) == ("PeerLostError", (1 - rank,)), seen.message
        assert f"at 10.0.0.{2 - rank}: " in seen.message and "cut off" in seen.message
        # What the first one closes may reach the other, where only one direction is cut.
        is_told = command is _ONE_WAY and "no acknowledgement for" in outcomes[1 - rank].message
        assert "no acknowledgement for" in seen.message or (is_told and "closed by that rank" in seen.message)
        assert seen.at_s - cut_at[0] < _DEAD_LINK_S + 12


def _sent_and_counted(group: Group, nodes: tuple[EmulatedNode, ...], store: str) -> tuple[int, int, int]:
    with _join(group, nodes[group.rank], store) as between:
        all_reduce = make_all_reduce("one-shot", between)
        sent_before, frames_before = _interface_totals()
        for _ in range(100):
            all_reduce(torch.ones(288))
        between.transport.barrier()
        sent, frames = _interface_totals()
        return sent - sent_before, frames - frames_before, between.transport.bytes_sent


def _interface_totals() -> tuple[int, int]:
    """Bytes and frames that this node's interface has sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    sent, frames = next(line for line in lines if WIRE in line).split()[9:11]
    return int(sent), int(frames)


def _message(kind: str, num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bfloat16":
        return torch.randn(num_bytes // 2, generator=generator).bfloat16().view(torch.uint8)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def _send_coded(group: Group, nodes: tuple[EmulatedNode, ...], store: str) -> dict[tuple[str, int], float]:
    """Exchange and gather messages of which some are coded; by message, the share of its bytes that left this node."""
    nodes[group.rank].enter()
    options = {"store": FileStore(store, 2), "device": torch.device("cpu"), "timeout_s": 20.0, "interface": WIRE}
    found = {}
    with open_process_group(Topology(group.rank, 2), sockets=SocketOptions(codes=True), **options) as between:
        for kind, num_bytes in (
            ("bfloat16", 1 << 20),
            ("bfloat16", 99_998),
            ("bfloat16", 3000),
            ("random", 300_001),
            ("random", 7),
        ):
            for seed in range(3):
                # Rank 0 gives numbers and rank 1 random bytes in one round, which then differ in their lengths on the wire.
                kinds = (kind, "random") if seed == 2 else (kind, kind)
                given = [_message(kinds[rank], num_bytes, 10 * seed + rank) for rank in range(2)]
                between.transport.barrier()
                before, sent_before = _interface_totals()[0], between.transport.bytes_sent
                received = between.transport.exchange([given[group.rank]] * 2)
                between.transport.barrier()
                sent = _interface_totals()[0] - before
                assert between.transport.bytes_sent - sent_before == num_bytes
                assert torch.equal(received[1 - group.rank], given[1 - group.rank])
                gathered = between.transport.gather(given[group.rank])
                assert all(torch.equal(*pair) for pair in zip(gathered, given, strict=True))
                shorter = num_bytes // 128 * 64
                parts = [
                    given[group.rank][: (num_bytes, shorter)[peer]] for peer in range(2)
                ]  # of one address, unlike in size
                delivered = between.transport.deliver(parts, [(num_bytes, shorter)[group.rank]] * 2)
                assert torch.equal(delivered[1 - group.rank], given[1 - group.rank][: (num_bytes, shorter)[group.rank]])
                if seed < 2:
                    found[kind, num_bytes] = sent / num_bytes
    return found


@needs_kernels
def test_long_messages_are_coded_and_arrive_as_they_were(network: EmulatedNetwork, tmp_path: Path) -> None:
    for shares in run_ranks(2, _send_coded, network.nodes, str(tmp_path / "store")):
        assert shares["bfloat16", 1 << 20] < 0.78 and shares["bfloat16", 99_998] < 0.80  # 0.71, and frames
        assert min(shares["bfloat16", 3000], shares["random", 300_001], shares["random", 7]) >= 1.0


def _send_unlike(group: Group, nodes: tuple[EmulatedNode, ...], store: str) -> str:
    nodes[group.rank].enter()
    options = {"store": FileStore(store, 2), "device": torch.device("cpu"), "timeout_s": 3.0, "interface": WIRE}
    between = open_process_group(Topology(group.rank, 2), sockets=SocketOptions(codes=True), **options)
    with between, pytest.raises(CommError) as caught:
        between.transport.gather(_message("bfloat16", (1 << 20) + 128 * group.rank, 0), [1 << 20, 1 << 20])
    return str(caught.value)


@needs_kernels
def test_a_coded_message_of_another_size_is_refused(network: EmulatedNetwork, tmp_path: Path) -> None:
    errors = run_ranks(2, _send_unlike, network.nodes, str(tmp_path / "store"))
    assert any("1048704 bytes" in error or "called different" in error for error in errors), errors


@pytest.mark.alone  # a late rank's packets are acknowledged by more of them
def test_a_message_adds_one_header_and_one_packet_at_most_two(network: EmulatedNetwork, tmp_path: Path) -> None:
    for sent, num_frames, counted in run_ranks(2, _sent_and_counted, network.nodes, str(tmp_path / "store")):
        assert counted == 100 * 1152
        # The barrier is a few small messages. A frame is repeated when the other rank is late.
        assert sent == pytest.approx(interface_bytes(counted, 100, num_frames), rel=0.03)
        overhead = (sent - counted) / 100
        # A packet carries the message; at most another one acknowledges the other rank's.
        assert HEADER_BYTES + FRAME_BYTES <= overhead <= HEADER_BYTES + 2.5 * FRAME_BYTES


class _Polls:
    """``select.poll`` that counts waits, and fails when one ends without an event: a message had come and woke nobody."""

    num_waits = 0

    def __init__(self) -> None:
        self._poll = _POLL()
        self.register = self._poll.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        _Polls.num_waits += 1
        events = self._poll.poll(timeout_ms)
        assert events, "nothing woke this rank"
        return events


_POLL = select.poll


def _wait_for_sizes(group: Group, sizes: tuple[int, ...], pauses: int) -> tuple[int, bool]:
    """Rank 1 sends messages of these sizes, each in so many parts with pauses between; how often rank 0 waited."""
    connection = group.transport._connections[1 - group.rank]  # pyright: ignore[reportAttributeAccessIssue]
    whole = True
    if group.rank == 0:  # only an event ends a wait
        sockets.select.poll, sockets._SLEEP_S, _Polls.num_waits = _Polls, 30.0, 0  # pyright: ignore[reportAttributeAccessIssue]
    for size in sizes:
        sent, got = torch.arange(size).to(torch.uint8), torch.zeros(size, dtype=torch.uint8)
        if group.rank == 0:
            group.transport._transfer([], [(1, got)])  # pyright: ignore[reportAttributeAccessIssue]
            whole = whole and torch.equal(sent, got)
        else:
            message = connection.outgoing(group.transport.call_tag(), sent, {})  # pyright: ignore[reportAttributeAccessIssue]
            data = memoryview(b"".join(message.parts))
            for part in range(pauses):
                time.sleep(0.02)
                connection.sock.setblocking(True)
                connection.sock.sendall(data[part * len(data) // pauses : (part + 1) * len(data) // pauses])
    return _Polls.num_waits, whole


@pytest.mark.parametrize(
    ("sizes", "pauses", "most"),
    [
        # A short message after one that waited for 256 KiB at a time; the rest of one that is no multiple of these.
        ((1 << 20, 8, 300 << 10, 1), 1, None),
        ((2 << 20,), 64, 16),  # one wait for 256 KiB, not one for each of 64 arrivals
    ],
)
def test_a_message_wakes_its_receiver_as_soon_as_it_is_whole_and_seldom_before(
    sizes: tuple[int, ...], pauses: int, most: int | None
) -> None:
    (num_waits, whole), _ = run_ranks(2, _wait_for_sizes, sizes, pauses, sockets=True)
    assert whole and num_waits <= (most or num_waits)  # none, if this rank is later than every message


def _call_different_sizes(group: Group) -> tuple[str, str]:
    try:
        group.transport.gather(torch.zeros(8 + group.rank, dtype=torch.uint8))
    except CommError as error:
        return type(error).__name__, str(error)
    return "none", ""


def _call_different_collectives(group: Group) -> tuple[str, str]:
    try:
        make_all_reduce(["one-shot", "two-shot"][group.rank], group)(torch.ones(64))
    except CommError as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_ranks_that_call_different_collectives_are_told_at_once() -> None:
    """None waits for the deadline, whose error would name no message."""
    for error, message in run_ranks(2, _call_different_collectives, sockets=True):
        assert error == CollectiveMismatchError.__name__, message
        assert "one-shot 256 B" in message and "two-shot 256 B" in message
    for error, message in run_ranks(2, _call_different_sizes, sockets=True):
        assert error != "none" and "bytes" in message
