"""The connection between two hosts: silence, and the last message."""

import asyncio
import socket

import pytest
from helpers.server.hosts import until

from tightwire.server.hosts.channel import Channel, LostError, accept_channels, introduce, meet, open_channel
from tightwire.server.hosts.messages import Beat, Challenge, End, Hello, Table, Welcome


async def connected() -> tuple[asyncio.Server, Channel, Channel]:
    """A listening server, and both ends of a connection to it."""
    channels: list[Channel] = []
    listener = socket.create_server(("127.0.0.1", 0))
    server = await accept_channels(listener, channels.append)
    here = await open_channel("127.0.0.1", listener.getsockname()[1], 3.0)
    await until(lambda: channels)
    return server, here, channels[0]


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


async def test_a_hello_that_may_be_too_long_for_the_network_is_told_so() -> None:
    """A connection and short messages pass, as through a tunnel whose ends have a larger MTU."""
    server, here, there = await connected()
    there.send(Challenge("nonce"))
    with pytest.raises(LostError, match="silent for 0.2 s; if only long messages are lost, lower the MTU of the"):
        await introduce(here, Hello(1, "127.0.0.1", "lo", [], {}, 0), b"", 0.2)
    await asyncio.gather(here.close(), there.close())
    server.close()


async def test_a_proof_that_is_no_hex_is_a_wrong_one_on_both_sides() -> None:
    """An exception here would end the server, and by one who does not know the secret."""
    server, here, there = await connected()
    meeting = asyncio.create_task(meet(there, b"secret"))
    assert isinstance(await here.receive(3.0), Challenge)
    here.send(Hello(1, "127.0.0.1", "lo", [], {}, 0, proof="é"))
    assert (await meeting)[1] is False
    there.send(Challenge("nonce"))
    there.send(Welcome("é"))
    with pytest.raises(ValueError, match="node 0 has another shared secret"):
        await introduce(here, Hello(1, "127.0.0.1", "lo", [], {}, 0), b"secret", 3.0)
    await asyncio.gather(here.close(), there.close())
    server.close()


async def test_the_last_message_arrives_although_the_sender_has_not_read_all() -> None:
    server, here, there = await connected()
    for _ in range(1000):
        here.send(Table("x" * 1000))
    await asyncio.sleep(0.05)
    there.send(End(0, "the reason"))
    await there.close()
    assert await here.receive(3.0) == End(0, "the reason")
    await here.close()
    server.close()


async def test_what_follows_the_end_is_dropped_while_the_other_host_has_not_closed() -> None:
    """As of a host that was cut off: its beats go on for half a second."""
    server, here, there = await connected()
    ending = asyncio.create_task(here.end(1, "the reason"))
    assert await there.receive(3.0) == End(1, "the reason")
    with pytest.raises(LostError, match="closed the connection"):
        await there.receive(3.0)
    assert not ending.done()
    here.send(Beat())
    await ending
    await there.close()
    server.close()
