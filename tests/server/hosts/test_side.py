"""What both sides do: a task that fails ends the server, and a failure ends the process in any case."""

import os
import socket
import sys
from subprocess import run

import pytest
from helpers.server.hosts import Told, free_ports, joining, until

from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member


async def test_a_failure_of_a_background_task_ends_the_server() -> None:
    told = Told()
    head = Head(joining(0, free_ports(6), told))

    async def read() -> None:
        raise FileNotFoundError(2, "No such file or directory", "model.gguf")

    head._start(read())
    await until(lambda: told.ends)
    assert told.ends[0][:2] == ("node 0 (127.0.0.1)", 1)
    assert "model.gguf" in told.ends[0][2]
    await head.close()


_STUCK = """
import asyncio, time
import pytest
from helpers.server.hosts import Told, free_ports, joining
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member

async def main():
    head = Head(joining(0, free_ports(6), Told()))
    head.fail(1, "a rank was killed")
    head.fail(2, "a later reason")
    time.sleep(60)

asyncio.run(main())
"""


def test_a_process_that_cannot_end_in_order_ends_with_the_code_of_the_first_failure() -> None:
    assert (
        run(
            [sys.executable, "-c", _STUCK], check=False, timeout=30, env={**os.environ, "PYTHONPATH": "src:tests"}
        ).returncode
        == 1
    )


async def test_an_orderly_end_calls_the_last_moment_off() -> None:
    head = Head(joining(0, free_ports(6), Told()))
    head.fail(1, "a rank was killed")
    await head.close()
    assert head._last_moment is not None
    head._last_moment.join(1)
    assert not head._last_moment.is_alive()


async def test_a_taken_port_is_a_refusal_of_joining() -> None:
    port = free_ports(6)
    member = Member(joining(1, port, Told()))
    with (
        socket.create_server(("127.0.0.1", port + 4)),
        pytest.raises(ValueError, match=f"listen on 127.0.0.1:{port + 4}"),
    ):
        await member.join()
    await member.close()
