"""Hosts that join over loopback: the table, refusals by node and key, ports that cannot be reached, and lost hosts."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest

from tightwire.server.config.hosts import HostOptions
from tightwire.server.hosts.channel import Channel, End, Hello, LostError, Table, accept_channels, open_channel
from tightwire.server.hosts.checks import merge_plans, objection_to, probe
from tightwire.server.hosts.head import Head, Joining
from tightwire.server.hosts.member import Member
from tightwire.server.hosts.place import find_place
from tightwire.server.ipc.messages import FromRank, Heartbeat
from tightwire.server.plan.rank_setup import RunPlan

_PLAN = RunPlan(
    device="cpu", dtype="bfloat16", allreduce="auto", transport="process-group", max_model_len=512, num_blocks=64
)


class Told:
    """What a side has been told."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.messages: list[FromRank] = []
        self.exits: list[tuple[int, int]] = []
        self.ends: list[tuple[str, int, str]] = []
        self.serving = self.stop = False

    def show(self, table: str) -> None:
        self.tables.append(table)

    def hear(self, message: FromRank) -> None:
        self.messages.append(message)

    def note_exit(self, rank: int, code: int) -> None:
        self.exits.append((rank, code))

    def note_serving(self) -> None:
        self.serving = True

    def note_end(self, node: str, code: int, reason: str) -> None:
        self.ends.append((node, code, reason))

    def ask_stop(self) -> None:
        self.stop = True


def free_ports(count: int) -> int:
    """The first of some neighbouring free ports."""
    for first in range(31000, 60000, count):
        held: list[socket.socket] = []
        try:
            held.extend(socket.create_server(("127.0.0.1", first + i)) for i in range(count))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def joining(node: int, port: int, told: Told, num_nodes: int = 2, changed: Mapping[str, str] | None = None) -> Joining:
    options = HostOptions(
        nnodes=num_nodes,
        node_rank=node,
        master_addr=f"127.0.0.1:{port}",
        port_range=f"{port + 1}-{port + 1 + 2 * num_nodes}",
    )
    facts = {"version": "1", "kernels": "v4", "--tp": "2", "--port-range": options.port_range, **(changed or {})}
    return Joining(find_place(options), range(node, node + 1), facts, told, 5.0, 8.0)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_hosts_join_agree_report_and_end() -> None:
    port, told, told_1 = free_ports(6), Told(), Told()
    member = Member(joining(1, port, told_1))
    waiting = asyncio.create_task(member.join())  # before node 0 has started
    await until(lambda: told_1.tables)
    assert told_1.tables[0].startswith(f"waiting for node 0 (127.0.0.1:{port}) for 1 s of 8 s: ")
    head = Head(joining(0, port, told))
    store = socket.create_server(("127.0.0.1", port + 1))  # rank 0's, which its parent opens
    await asyncio.gather(head.join(), waiting)
    assert head.link is not None and member.link == head.link, "all nodes decide by the same probe"
    [pair] = head.link.pairs
    assert pair.nodes == (0, 1) and 0 < pair.round_trip_s < 0.1 and pair.bytes_per_s > 1e6
    facts = {"the model": "abc"}
    small = msgspec.structs.replace(_PLAN, num_blocks=32)
    assert await asyncio.gather(head.agree(facts, _PLAN), member.agree(facts, small)) == [small, small]
    beat = Heartbeat(rank=1, step=3, doing="step", busy_s=0.1)
    member.relay(beat)
    await until(lambda: told.messages)
    assert told.messages == [beat]
    await head.close(0, "")
    await until(lambda: told_1.ends)
    assert told_1.ends == [(f"node 0 (127.0.0.1:{port})", 0, "")]
    await member.close(0, "")
    store.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"--tp": "4"},
            r"node 1 \(127.0.0.1\) has --tp 4, node 0 \(127.0.0.1\) has --tp 2; start the same command on every",
        ),
        (
            {"version": "2", "--tp": "4"},
            "has version 2, node 0 .* has version 1; install the same version on every host",
        ),
        ({"kernels": "v3"}, "set TIGHTWIRE_KERNELS to a level that every CPU has, such as v3, on every host"),
    ],
)
async def test_a_mismatch_is_refused_at_once_on_both(changed: dict[str, str], reason: str) -> None:
    port, told, told_1 = free_ports(6), Told(), Told()
    head, member = Head(joining(0, port, told)), Member(joining(1, port, told_1, changed=changed))
    other = asyncio.create_task(member.join())
    with pytest.raises(ValueError, match=reason):
        await asyncio.wait_for(head.join(), 5)
    await until(lambda: told_1.ends)
    assert told_1.ends[0][1] == 2
    other.cancel()
    await head.close(2, "")
    await member.close(2, "")


async def test_another_model_is_refused_by_node() -> None:
    port = free_ports(6)
    head, member = Head(joining(0, port, Told())), Member(joining(1, port, Told()))
    store = socket.create_server(("127.0.0.1", port + 1))
    await asyncio.gather(head.join(), member.join())
    other = asyncio.create_task(member.agree({"the model": "b"}, _PLAN))
    with pytest.raises(
        ValueError, match=r"node 1 .* has the model b, node 0 .* has the model a; give the same model on every"
    ):
        await head.agree({"the model": "a"}, _PLAN)
    other.cancel()
    await head.close(2, "")
    await member.close(2, "")
    store.close()


async def test_a_missing_node_is_named_with_its_time() -> None:
    told = Told()
    head = Head(replace(joining(0, free_ports(8), told, num_nodes=3), join_timeout_s=1.5))
    with pytest.raises(
        LostError, match="1 of 3 nodes joined; node 1, node 2 missing for 2 s; start the same command there"
    ):
        await head.join()
    assert told.tables == ["1 of 3 nodes joined; node 1, node 2 missing for 1 s of 1.5 s"]
    await head.close(1, "")


async def test_a_node_that_closes_its_connection_is_lost() -> None:
    port, told = free_ports(6), Told()
    head, member = Head(joining(0, port, told)), Member(joining(1, port, Told()))
    store = socket.create_server(("127.0.0.1", port + 1))
    await asyncio.gather(head.join(), member.join())
    assert member._channel is not None
    member._channel._writer.transport.abort()
    await until(lambda: told.ends)
    assert told.ends[0][:2] == ("node 1 (127.0.0.1)", 1)
    assert told.ends[0][2].startswith("lost: it ")
    await head.close(1, "")
    await member.close(1, "")
    store.close()


async def test_a_silent_host_is_lost_within_its_deadline() -> None:
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    address, port = server.sockets[0].getsockname()
    channel = await open_channel(address, port, 3.0)
    with pytest.raises(LostError, match="has been silent for 0.2 s"):
        await channel.receive(0.2)
    await channel.close()
    accepted[0].close()
    server.close()


async def test_a_port_that_cannot_be_reached_is_named() -> None:
    port = free_ports(1)
    failures = await probe(1, {1: ("127.0.0.1", [1]), 2: ("127.0.0.1", [port])})
    assert len(failures) == 1
    assert failures[0].startswith(f"port {port} on node 2 (127.0.0.1) cannot be reached from node 1: ")


def test_a_node_number_out_of_range_is_refused() -> None:
    own = Hello(0, "10.0.0.1", "eth0", [], {})
    reason = objection_to(Hello(5, "10.0.0.9", "eth0", [], {}), own, 3)
    assert reason == "a host at 10.0.0.9 says that it is node 5; nodes are 1 to 2 there"


def test_plans_that_differ_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match="node 1 would run with dtype float32, node 0 with bfloat16"):
        merge_plans({0: _PLAN, 1: msgspec.structs.replace(_PLAN, dtype="float32")})


async def test_a_host_with_another_secret_is_refused_and_does_not_end_the_others() -> None:
    port, told = free_ports(6), Told()
    head = Head(replace(joining(0, port, told), secret=b"one secret of all hosts"))
    waiting = asyncio.create_task(head.join())
    stranger = Member(replace(joining(1, port, Told()), secret=b"another secret"))
    with pytest.raises(ValueError, match=r"node 1 .* has another shared secret, or none; give every host the same"):
        await stranger.join()
    await stranger.close(2, "")
    assert not waiting.done()
    waiting.cancel()
    await head.close(1, "")


async def test_a_node_that_starts_again_while_others_are_missing_takes_its_place() -> None:
    port, told = free_ports(8), Told()
    head = Head(joining(0, port, told, num_nodes=3))
    waiting = asyncio.create_task(head.join())
    old = Member(joining(1, port, Told(), num_nodes=3))
    tasks = [asyncio.create_task(old.join())]
    await until(lambda: 1 in head.addresses)
    first = head._nodes[1]
    old._free_ports()
    new = Member(joining(1, port, Told(), num_nodes=3))
    tasks.append(asyncio.create_task(new.join()))
    await until(lambda: head._nodes.get(1, first) is not first)
    assert not waiting.done()
    assert head.addresses.keys() == {0, 1}
    for task in (waiting, *tasks):
        task.cancel()
    for side in (head, old, new):
        await side.close(1, "")


async def test_a_node_that_starts_again_after_all_have_joined_ends_all_and_may_be_started_again() -> None:
    port, told = free_ports(6), Told()
    head, old = Head(joining(0, port, told)), Member(joining(1, port, Told()))
    store = socket.create_server(("127.0.0.1", port + 1))
    await asyncio.gather(head.join(), old.join())
    old._free_ports()
    told_1 = Told()
    new = Member(joining(1, port, told_1))
    joins = asyncio.create_task(new.join())
    await until(lambda: told_1.ends)
    # Exit code 1; after a refusal (2) systemd does not start the node again.
    reason = "node 0 (127.0.0.1) ends, because a node was lost; start all nodes again"
    assert told_1.ends == [(f"node 0 (127.0.0.1:{port})", 1, reason)]
    assert told.ends[0] == ("node 1 (127.0.0.1)", 1, "lost: it has started again")
    joins.cancel()
    for side in (head, old, new):
        await side.close(1, "")
    store.close()


async def test_waiting_for_a_node_is_cancelled_at_the_moment_of_its_message() -> None:
    head = Head(joining(0, free_ports(6), Told()))
    waiting = asyncio.create_task(head._until(lambda: [1], "opened the model"))
    await asyncio.sleep(0.01)
    head._changed.set()  # as when a node's last message ends the server
    await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=2)
    assert done == {waiting}
    await head.close(1, "")


async def test_a_failure_of_a_background_task_ends_the_server() -> None:
    told = Told()
    head = Head(joining(0, free_ports(6), told))

    async def read() -> None:
        raise FileNotFoundError(2, "No such file or directory", "model.gguf")

    head._start(asyncio.create_task(read()))
    await until(lambda: told.ends)
    assert told.ends[0][:2] == ("node 0 (127.0.0.1)", 1)
    assert "model.gguf" in told.ends[0][2]
    await head.close(1, "")


async def test_the_last_message_arrives_although_the_sender_has_not_read_all() -> None:
    channels: list[Channel] = []
    listener = socket.create_server(("127.0.0.1", 0))
    server = await accept_channels(listener, channels.append)
    here = await open_channel("127.0.0.1", listener.getsockname()[1], 3.0)
    await until(lambda: channels)
    for _ in range(1000):
        here.send(Table("x" * 1000))
    await asyncio.sleep(0.05)
    channels[0].send(End(0, "the reason"))
    await channels[0].close()
    assert await here.receive(3.0) == End(0, "the reason")
    await here.close()
    server.close()
