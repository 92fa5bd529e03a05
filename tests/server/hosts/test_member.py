"""A node that is not node 0: it is refused, fetches a model that it has not, and starts again."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.server.hosts import PLAN, Told, free_ports, joining, tiny_checkpoint, two_hosts, until

from tightwire.server.hosts.channel import Channel, LostError, accept_channels
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member


async def test_a_host_with_another_secret_is_refused_and_does_not_end_the_others() -> None:
    port, told = free_ports(6), Told()
    head = Head(replace(joining(0, port, told), secret=b"one secret of all hosts"))
    waiting = asyncio.create_task(head.join())
    stranger = Member(replace(joining(1, port, Told()), secret=b"another secret"))
    with pytest.raises(ValueError, match=r"node 1 .* has another shared secret, or none; give every host the same"):
        await stranger.join()
    await stranger.close()
    assert not waiting.done()
    waiting.cancel()
    await head.close()


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
        await side.close()
    store.close()


async def test_a_node_tries_again_if_its_first_connection_is_dropped() -> None:
    """As by a node 0 that has waited too long for a HELLO, and goes on waiting for the node."""
    port, dropped = free_ports(6), asyncio.Event()

    def drop(channel: Channel) -> None:
        channel.abandon()
        dropped.set()

    busy = await accept_channels(socket.create_server(("127.0.0.1", port)), drop)
    told = Told()
    member = Member(joining(1, port, told))
    joins = asyncio.create_task(member.join())
    await asyncio.wait_for(dropped.wait(), 10)
    busy.close()
    head, store = Head(joining(0, port, Told())), socket.create_server(("127.0.0.1", port + 1))
    await asyncio.gather(head.join(), joins)
    assert not told.ends
    await head.close()
    await member.close()
    store.close()


async def test_what_listens_in_the_place_of_node_0_and_is_silent_is_waited_for_no_longer_than_for_node_0() -> None:
    accepted: list[asyncio.StreamWriter] = []
    other = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    member = Member(replace(joining(1, other.sockets[0].getsockname()[1], Told()), join_timeout_s=0.2))
    with pytest.raises(LostError, match=r"node 0 .* could not be reached for 0 s: it has been silent for 0.2 s; start"):
        await asyncio.wait_for(member.join(), 10)
    await member.close()
    accepted[0].close()
    other.close()


async def test_a_model_that_is_not_here_is_fetched_from_node_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_checkpoint(tmp_path)
    async with two_hosts() as (head, member, _):
        waiting = asyncio.create_task(head.agree(model, PLAN))
        shares: list[float] = []
        path = await member.find_model(str(tmp_path / "elsewhere"), lambda _, share: shares.append(share))
        assert sorted(file.name for file in Path(path).iterdir() if file.name != ".lock") == sorted(
            file.name for file in (tmp_path / "tiny0").iterdir()
        )
        assert shares == sorted(shares) and shares
        assert await member.find_model(path, lambda *_: None) == path, "it is here now"
        assert await asyncio.gather(waiting, member.agree(model, PLAN)) == [PLAN, PLAN]
