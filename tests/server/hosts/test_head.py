"""Hosts that join over loopback: the table, refusals by node and key, and lost hosts."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from helpers.server.hosts import PLAN, Told, free_ports, joining, tiny_checkpoint, two_hosts, until

from tightwire.server.hosts.channel import LostError, introduce, open_channel
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member
from tightwire.server.ipc.messages import Heartbeat
from tightwire.server.plan.rank_setup import LayoutChoice


async def test_hosts_join_agree_report_and_end(tmp_path: Path) -> None:
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
    choice = LayoutChoice("hybrid", "shorter")
    rooms: list[Sequence[int]] = []
    choosing = [asyncio.to_thread(side.settle, lambda room: rooms.append(room) or choice) for side in (member, head)]
    assert await asyncio.gather(*choosing) == [choice, choice], "node 0 decides for all"
    assert len(rooms) == 1 and len(rooms[0]) == 2 and min(rooms[0]) > 0, "by the memory of every host"
    model = tiny_checkpoint(tmp_path)
    small = msgspec.structs.replace(PLAN, num_blocks=32)
    assert await asyncio.gather(head.agree(model, PLAN), member.agree(model, small)) == [small, small]
    beat = Heartbeat(rank=1, step=3, doing="step", busy_s=0.1)
    member.relay(beat)
    await until(lambda: told.messages)
    assert told.messages == [beat]
    member.relay_exit(1, -9)
    await until(lambda: told.exits)
    assert told.exits == [(1, -9)]
    head.note_ready()
    await until(lambda: told_1.serving)
    assert told.serving
    member.ask_stop()
    await until(lambda: told.stops)
    assert told.stops == ["node 1 (127.0.0.1)"]
    await head.close()
    await until(lambda: told_1.stops)
    assert told_1.stops == [f"node 0 (127.0.0.1:{port})"] and told_1.ends == []
    await member.close()
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
    await head.close()
    await member.close()


async def test_a_host_with_another_secret_is_shown_only_while_nodes_are_missing() -> None:
    """What is shown stands in the place of answers: this server no longer answered after such a host had come."""
    port, told, told_1 = free_ports(6), Told(), Told()
    head, member = Head(joining(0, port, told)), Member(joining(1, port, told_1))
    store = socket.create_server(("127.0.0.1", port + 1))

    async def come() -> None:
        stranger = await open_channel("127.0.0.1", port, 3.0)
        with pytest.raises(ValueError, match=r"node 1 .* has another shared secret"):
            await introduce(stranger, joining(1, port, Told()).hello(), b"another", 3.0)
        await stranger.close()

    joins = [asyncio.create_task(head.join())]
    await until(lambda: head._server)
    await come()
    joins.append(asyncio.create_task(member.join()))
    await asyncio.gather(*joins)
    await come()
    assert sum("secret" in table for table in told.tables) == 1 and not told.ends
    await asyncio.gather(head.close(), member.close())
    store.close()


async def test_a_node_that_starts_after_a_refusal_hears_it() -> None:
    port, told_2 = free_ports(8), Told()
    head, first = (
        Head(joining(0, port, Told(), num_nodes=3)),
        Member(joining(1, port, Told(), num_nodes=3, changed={"--tp": "4"})),
    )
    refused, joins = asyncio.create_task(head.join()), [asyncio.create_task(first.join())]
    await until(lambda: head._refusal)
    second = Member(joining(2, port, told_2, num_nodes=3))
    joins.append(asyncio.create_task(second.join()))
    await until(lambda: told_2.ends)
    assert told_2.ends[0][1] == 2 and "node 1 (127.0.0.1) has --tp 4, node 0" in told_2.ends[0][2]
    for task in (refused, *joins):
        task.cancel()
    for side in (head, first, second):
        await side.close()


async def test_another_model_is_refused_by_node(tmp_path: Path) -> None:
    async with two_hosts() as (head, member, _):
        other = asyncio.create_task(member.agree(tiny_checkpoint(tmp_path, seed=1), PLAN))
        with pytest.raises(
            ValueError,
            match=r"node 1 .* has the model [0-9a-f]+, node 0 .* has the model [0-9a-f]+; give the same files on every",
        ):
            await head.agree(tiny_checkpoint(tmp_path), PLAN)
        other.cancel()


async def test_a_missing_node_is_named_with_its_time() -> None:
    told = Told()
    head = Head(replace(joining(0, free_ports(8), told, num_nodes=3), join_timeout_s=1.5))
    with pytest.raises(
        LostError, match="1 of 3 nodes joined; node 1, node 2 missing for 2 s; start the same command there"
    ):
        await head.join()
    assert told.tables == ["1 of 3 nodes joined; node 1, node 2 missing for 1 s of 1.5 s"]
    await head.close()


async def test_a_node_that_closes_its_connection_is_lost() -> None:
    told = Told()
    async with two_hosts(told) as (_, member, _):
        assert member._channel is not None
        member._channel._writer.transport.abort()
        await until(lambda: told.ends)
        assert told.ends[0][:2] == ("node 1 (127.0.0.1)", 1)
        assert told.ends[0][2].startswith("lost: it ")


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
        await side.close()


async def test_a_node_that_starts_again_after_the_model_is_open_ends_all_so_that_all_start_again(
    tmp_path: Path,
) -> None:
    port, told, told_2 = free_ports(6), Told(), Told()
    head, old, new = Head(joining(0, port, told)), Member(joining(1, port, Told())), Member(joining(1, port, told_2))
    store = socket.create_server(("127.0.0.1", port + 1))
    await asyncio.gather(head.join(), old.join())
    model = tiny_checkpoint(tmp_path)
    await asyncio.gather(head.agree(model, PLAN), old.agree(model, PLAN))
    joins = asyncio.create_task(new.join())
    await until(lambda: told_2.ends)
    assert told.ends[0] == ("node 1 (127.0.0.1)", 1, "lost: it has started again")
    reason = "node 0 (127.0.0.1) ends, because a node was lost; start all nodes again"
    assert told_2.ends == [(f"node 0 (127.0.0.1:{port})", 1, reason)]
    joins.cancel()
    for side in (head, old, new):
        await side.close()
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
    await head.close()


async def test_steps_of_other_nodes_ranks_go_to_their_addresses() -> None:
    async with two_hosts() as (head, member, port):
        local = ["ipc://rank0", f"tcp://0.0.0.0:{port + 4}"]
        assert list(head.inboxes(local)) == ["ipc://rank0", f"tcp://127.0.0.1:{port + 4}"]
        assert list(member.inboxes(local)) == local
        assert (head.watched, member.watched) == (range(2), range(1, 2))
        assert [head.node_of(rank) for rank in head.watched] == ["node 0", "node 1"]
