"""A call beside the loop: its result or error, and an end that does not wait for it."""

import asyncio
import threading
import time

import pytest

from tightwire.server.ranks.background import Background


async def test_the_result_comes_to_the_loop() -> None:
    call = Background(threading.get_ident)
    assert await asyncio.wait_for(call.result, 5) != threading.get_ident()
    assert call.join(5)


async def test_the_error_comes_to_the_loop() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await asyncio.wait_for(Background(fail).result, 5)


def test_the_loop_ends_while_the_call_goes_on() -> None:
    release = threading.Event()
    calls: list[Background[bool]] = []

    async def leave() -> None:
        calls.append(Background(lambda: release.wait(60)))
        calls[0].result.cancel()

    started_s = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - started_s < 5
    assert not calls[0].join(0)
    release.set()
    assert calls[0].join(5)
