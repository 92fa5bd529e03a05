"""Reading ahead: the same items in the same order, errors where their item would have come, an end at any time."""

from collections.abc import Iterator
from itertools import count
from threading import Event

import pytest

from tightwire import read_ahead as module
from tightwire.read_ahead import ReadAhead, until_closed


def _next(ahead: ReadAhead[int]) -> int | None:
    return ahead.get(lambda: False)


def test_items_come_in_order() -> None:
    ahead = ReadAhead(iter(range(100)), 3)
    assert [_next(ahead) for _ in range(100)] == list(range(100))


def test_an_error_is_raised_in_place_of_its_item_and_again() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    ahead = ReadAhead(source(), 1)
    assert _next(ahead) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
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
