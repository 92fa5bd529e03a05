"""The counters of an emulated wire; benches on emulated hosts run in tests/suites."""

import pytest

from tightwire.bench.hosts import Sent, read_sent

_LOOPBACK = "Inter-|   Receive\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 9 9 0 0\n"


def test_bytes_and_frames_are_those_that_the_wire_has_sent() -> None:
    counters = f"{_LOOPBACK} wire0: 1 1 0 0 0 0 0 0 10066 3 0 0 0 0 0 0\n"
    assert read_sent(counters) == Sent(bytes=10066, frames=3)


def test_a_process_on_no_emulated_node_has_no_wire() -> None:
    with pytest.raises(RuntimeError, match="not on an emulated node"):
        read_sent(_LOOPBACK)
