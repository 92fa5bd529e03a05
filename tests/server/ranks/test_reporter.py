"""A rank's recording, on a clock of the test: parts while it goes on, one last part when the time is over."""

from pathlib import Path

import pytest

from tightwire.comm.ledger.ledger import Ledger
from tightwire.server.ipc.messages import Record, Recorded
from tightwire.server.ranks.reporter import Recorder, Reporter


@pytest.fixture
def sent() -> list[Recorded]:
    return []


@pytest.fixture
def recorder(sent: list[Recorded]) -> Recorder:
    return Recorder(3, sent.append)


def collective(ledger: Ledger, times: int = 1) -> None:
    for _ in range(times):
        ledger.begin("all_reduce", "ring", 8)
        ledger.end(8)


def test_nothing_is_sent_unasked(recorder: Recorder, sent: list[Recorded]) -> None:
    recorder.pump(100.0)
    assert sent == [] and recorder.end_s is None


def test_parts_come_meanwhile_and_the_last_when_the_time_is_over(recorder: Recorder, sent: list[Recorded]) -> None:
    ledger = Ledger()
    collective(ledger)
    recorder.start(Record(id=5, seconds=2.0), [ledger], 100.0)
    assert recorder.end_s == 102.0
    collective(ledger)
    recorder.pump(101.0)
    recorder.pump(101.5)
    collective(ledger)
    recorder.pump(102.0)
    collective(ledger)
    recorder.pump(103.0)

    assert [(part.rank, part.id, part.last) for part in sent] == [(3, 5, False), (3, 5, False), (3, 5, True)]
    assert [event.number for part in sent for event in part.events] == [2, 3]
    assert recorder.end_s is None


def test_large_recordings_are_cut(recorder: Recorder, sent: list[Recorded]) -> None:
    ledger = Ledger()
    recorder.start(Record(id=0, seconds=1.0), [ledger], 0.0)
    collective(ledger, 5000)
    recorder.pump(0.5)
    collective(ledger, 5000)
    recorder.pump(1.0)
    assert [len(part.events) for part in sent] == [4096, 904, 4096, 904, 0]
    assert [part.last for part in sent] == [False] * 4 + [True]


def test_a_rank_that_hangs_is_recorded_with_what_it_hangs_in(recorder: Recorder, sent: list[Recorded]) -> None:
    ledger = Ledger()
    recorder.start(Record(id=0, seconds=1.0), [ledger], 0.0)
    ledger.begin("all_reduce", "ring", 8)
    recorder.pump(1.0)
    assert [(event.number, event.finished) for event in sent[0].events] == [(1, False)]


def test_a_new_wish_ends_the_recording_under_way(recorder: Recorder, sent: list[Recorded]) -> None:
    ledger = Ledger()
    recorder.start(Record(id=0, seconds=9.0), [ledger], 0.0)
    collective(ledger)
    recorder.start(Record(id=1, seconds=1.0), [ledger], 0.5)
    collective(ledger)
    recorder.pump(1.5)
    assert {part.id for part in sent} == {1}
    assert [event.number for part in sent for event in part.events] == [2]


def test_messages_of_other_connections_have_rows_of_their_own(recorder: Recorder, sent: list[Recorded]) -> None:
    sums, messages = Ledger(), Ledger()
    recorder.start(Record(id=0, seconds=1.0), [sums, messages], 0.0)
    collective(sums)
    messages.begin("deliver", "hidden-state", 8, site="stage boundary")
    messages.end(8)
    recorder.pump(0.5)
    collective(sums)
    recorder.pump(1.0)
    assert [(part.row, event.op, event.number) for part in sent for event in part.events] == [
        (0, "all_reduce", 1),
        (1, "deliver", 1),
        (0, "all_reduce", 2),
    ]
    assert [part.last for part in sent] == [False, False, False, True]


def test_a_heartbeat_has_the_times_of_all_ledgers(tmp_path: Path) -> None:
    reporter = Reporter(0, f"ipc://{tmp_path}/parent", f"ipc://{tmp_path}/own")
    try:
        beside = Ledger()
        reporter.other_ledgers = [beside]
        collective(reporter.ledger)
        beside.begin("deliver", "hidden-state", 8)
        beside.end(8)
        assert [each[:2] for each in reporter._heartbeat().latencies] == [
            ("all_reduce", "ring"),
            ("deliver", "hidden-state"),
        ]
    finally:
        reporter.close()
