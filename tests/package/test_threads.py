"""Reading ahead: the same items in the same order, errors in the place of their item, an end at any time; and calls that no exit awaits."""

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import count
from threading import Event

import pytest

from tightwire import threads as module
from tightwire.threads import Background, ReadAhead, until_closed


class Panic(BaseException):
    """As PyO3 raises for a panic: no Exception."""


def _next(ahead: ReadAhead[int]) -> int | None:
    return ahead.get(lambda: False)


def test_items_come_in_order() -> None:
    ahead = ReadAhead(iter(range(100)), 3)
    assert [_next(ahead) for _ in range(100)] == list(range(100))


@pytest.mark.parametrize("kind", [OSError, Panic])
def test_an_error_is_raised_in_place_of_its_item_and_again(kind: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise kind("disk")

    ahead = ReadAhead(source(), 1)
    assert _next(ahead) == 1
    for _ in range(2):
        with pytest.raises(kind, match="disk"):
            _next(ahead)


def test_a_reader_can_stop_waiting() -> None:
    comes = Event()

    def source() -> Iterator[int]:
        comes.wait()
        yield 1

    ahead = ReadAhead(source(), 1)
    assert ahead.get(lambda: True) is None
    comes.set()
    assert ahead.get(lambda: False) == 1


def test_closing_stops_a_source_that_skips_items() -> None:
    closed = Event()
    ahead = ReadAhead((number for number in until_closed(count(), closed) if number < 0), 1, closed)
    ahead.close()
    ahead._thread.join()


def test_closing_does_not_wait_for_a_silent_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    comes = Event()
    ahead = ReadAhead((number for number in count() if comes.wait()), 1)
    ahead.close()
    assert ahead._thread.is_alive()
    comes.set()
    ahead._thread.join()


def test_closing_works_while_items_wait() -> None:
    ahead = ReadAhead(count(), 2)
    assert _next(ahead) == 0
    ahead.close()
    assert not ahead._thread.is_alive()


async def test_the_result_comes_to_the_loop() -> None:
    call = Background(threading.get_ident)
    assert await asyncio.wait_for(call.result, 5) != threading.get_ident()
    assert call.join(5)


async def test_the_error_comes_to_the_loop() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await asyncio.wait_for(Background(fail).result, 5)


async def test_a_panic_of_rust_comes_to_the_loop() -> None:
    def fail() -> None:
        raise Panic("regex")

    with pytest.raises(Panic, match="regex"):
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
