"""A trace in order passes; one that lacks any one wait is found out."""

import pytest

from tightwire.bench.stream.order import OrderCheck
from tightwire.buffers import BufferConflictError, BufferEvent


def trace(text: str) -> list[BufferEvent]:
    """``fill 3 0`` a line: kind, owner, buffer."""
    lines = [line.split() for line in text.strip().splitlines()]
    return [BufferEvent(float(i), kind, int(owner), int(buffer)) for i, (kind, owner, buffer) in enumerate(lines)]


GOOD: str = """
fill 3 0
filled 3 0
fill 4 1
use 3 0
filled 4 1
release 3 0
fill 5 0
use 4 1
release 4 1
"""


def test_an_orderly_trace_passes() -> None:
    OrderCheck().check(trace(GOOD))


@pytest.mark.parametrize(
    ("line", "condition"),
    [("filled 3 0", "C1"), ("use 3 0", "C1"), ("release 3 0", "C2"), ("use 4 1", "C1"), ("filled 4 1", "C1")],
)
def test_a_trace_that_lacks_any_one_wait_is_found_out(line: str, condition: str) -> None:
    lines = [kept for kept in GOOD.strip().splitlines() if kept != line]
    with pytest.raises(BufferConflictError, match=condition):
        OrderCheck().check(trace("\n".join(lines)))


SAVED: str = """
fill 3 0
filled 3 0
fill 4 1
use 3 0
filled 4 1
release 3 0
use 4 1
save 3 0
release 4 1
saved 3 0
fill 5 0
save 4 1
saved 4 1
fill 4 1
"""


def test_an_orderly_trace_with_saves_passes() -> None:
    OrderCheck(saves=True).check(trace(SAVED))


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        ("filled 3 0", "C1"),
        ("use 3 0", "C1"),
        ("release 3 0", "C1"),  # saved while it is worked with
        ("save 3 0", "C1"),
        ("saved 3 0", "C2"),
        ("use 4 1", "C1"),
        ("saved 4 1", "C2"),
    ],
)
def test_a_trace_with_saves_that_lacks_any_one_wait_is_found_out(line: str, condition: str) -> None:
    lines = [kept for kept in SAVED.strip().splitlines() if kept != line]
    with pytest.raises(BufferConflictError, match=condition):
        OrderCheck(saves=True).check(trace("\n".join(lines)))


def test_a_piece_fetched_before_it_was_saved_is_found_out() -> None:
    with pytest.raises(BufferConflictError, match="C3: buffer 1 was filled for 3 after its 'save' in buffer 0"):
        OrderCheck(saves=True).check(trace("fill 3 0\nfilled 3 0\nuse 3 0\nrelease 3 0\nsave 3 0\nfill 3 1"))


def test_a_slot_filled_before_its_release_is_found_out() -> None:
    with pytest.raises(BufferConflictError, match="C2: buffer 0 was filled for 5 after 'use' of 3"):
        OrderCheck().check(trace("fill 3 0\nfilled 3 0\nuse 3 0\nfill 5 0"))
