"""Counting collectives: totals by kind, the one under way, and recordings."""

import threading
import time

import numpy as np
import pytest

from tightwire.comm.ledger.ledger import Ledger, Spent
from tightwire.comm.ledger.recording import Event, Series


def record(
    ledger: Ledger, algorithm: str = "ring", num_bytes: int = 64, sent: int = 64, phase: str = "", site: str = ""
) -> None:
    ledger.begin("all_reduce", algorithm, num_bytes, phase, site)
    ledger.end(sent)


def test_totals_by_op_algorithm_and_phase() -> None:
    ledger = Ledger()
    for phase, sent in (("prefill", 100), ("decode", 10), ("decode", 10)):
        record(ledger, sent=sent, phase=phase)

    totals = {(c.op, c.algorithm, c.phase): (c.calls, c.bytes_sent, c.message_bytes) for c in ledger.counters.counts()}

    assert totals == {
        ("all_reduce", "ring", "prefill"): (1, 100, 64),
        ("all_reduce", "ring", "decode"): (2, 20, 128),
    }
    assert all(count.seconds >= 0 for count in ledger.counters.counts())


def test_exact_bytes_are_those_sent_unless_the_algorithm_says_otherwise() -> None:
    ledger = Ledger()
    record(ledger, sent=100)
    ledger.begin("all_reduce", "flash-int8", 64)
    ledger.end(30, exact_bytes=60)

    assert [(count.bytes_sent, count.exact_bytes) for count in ledger.counters.counts()] == [(100, 100), (30, 60)]


def test_what_was_added_since_a_reading() -> None:
    ledger = Ledger()
    record(ledger)
    before = ledger.counters.counts()[0]
    record(ledger)
    added = ledger.counters.counts()[0].since(before)

    assert (added.calls, added.bytes_sent, added.exact_bytes, added.message_bytes) == (1, 64, 64, 64)
    assert added.seconds == ledger.counters.counts()[0].seconds - before.seconds
    assert before.since(None) == before


def test_coding_is_counted_within_its_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 5.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr("tightwire.comm.ledger.ledger.perf_counter", lambda: next(times))
    ledger = Ledger()
    ledger.begin("all_reduce", "flash-int8", 64)
    with ledger.coding:
        pass
    with ledger.coding:
        pass
    ledger.end(30, exact_bytes=60)
    before = ledger.counters.counts()[0]
    record(ledger)

    assert [(count.seconds, count.codec_seconds) for count in ledger.counters.counts()] == [(9.0, 3.0), (2.0, 0.0)]
    assert ledger.counters.counts()[0].since(before).codec_seconds == 0
    assert ledger.spent() == Spent(seconds=11.0, codec_seconds=3.0, num_unsplit=0)


def test_coding_that_a_kernel_hides_is_not_known() -> None:
    ledger = Ledger()
    before = None
    for _ in range(2):
        ledger.begin("all_reduce", "flash-int8", 64)
        ledger.hide_coding()
        ledger.end(30, exact_bytes=60)
        before = before or ledger.counters.counts()[0]

    assert ledger.counters.counts()[0].codec_seconds is None
    assert ledger.counters.counts()[0].since(before).codec_seconds is None
    assert ledger.spent().num_unsplit == 2


def test_quantiles_are_of_the_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    assert ledger.counters.latencies() == []
    times = iter([t for i in range(100) for t in (i, i + (i + 1) * 1e-6)])
    monkeypatch.setattr("tightwire.comm.ledger.ledger.perf_counter", lambda: next(times))
    for _ in range(100):
        record(ledger)
    (latency,) = ledger.counters.latencies()
    assert (latency.p50_us, latency.p99_us) == pytest.approx((51, 100), abs=1e-3)

    monkeypatch.setattr("tightwire.comm.ledger.ledger.perf_counter", lambda: 7.0)
    for _ in range(600):
        record(ledger)
    assert ledger.counters.latencies()[0].p99_us == 0

    ledger.counters.forget_latencies()
    assert ledger.counters.latencies() == []
    times = iter([0.0, 2e-6])
    monkeypatch.setattr("tightwire.comm.ledger.ledger.perf_counter", lambda: next(times))
    record(ledger)
    assert ledger.counters.latencies()[0][3:] == pytest.approx((2, 2))


def test_current_is_readable_from_another_thread_and_counts_on() -> None:
    ledger = Ledger()
    assert ledger.current() is None and ledger.last() is None
    ledger.begin("all_gather", "direct", 8)
    ledger.end(8)
    ledger.begin("all_reduce", "native", 1152)
    time.sleep(0.15)
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(ledger.current()))
    thread.start()
    thread.join()

    assert seen[0] is not None and seen[0].startswith("all_reduce native 1152 B, #2, 0.")
    assert float(seen[0].split()[-2]) >= 0.1
    assert ledger.last() == "all_gather direct 8 B, #1"
    assert ledger.number == 2

    ledger.end(0)
    assert ledger.current() is None


def test_a_recording_holds_each_collective_between_its_start_and_its_end() -> None:
    ledger = Ledger()
    record(ledger)
    assert ledger.recording.take(10) == []
    ledger.recording.start()
    for _ in range(3):
        record(ledger, "one-shot", num_bytes=1152, sent=10, phase="decode", site="o_proj 3")
    first = ledger.recording.take(2)
    ledger.begin("all_gather", "direct", 8)
    rest = ledger.recording.stop()
    ledger.end(8)

    assert [event.number for event in first] == [2, 3]
    assert first[0]._replace(start_s=0, seconds=0) == Event(
        "all_reduce", "one-shot", "decode", "o_proj 3", 2, 1152, 10, 10, 0, 0
    )
    assert 0 < first[0].start_s <= first[1].start_s
    assert [(event.number, event.op, event.finished) for event in rest] == [
        (4, "all_reduce", True),
        (5, "all_gather", False),
    ]
    assert ledger.recording.take(10) == []


def test_a_recording_nobody_takes_away_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightwire.comm.ledger.recording._MAX_EVENTS", 4)
    ledger = Ledger()
    ledger.recording.start()
    for _ in range(10):
        record(ledger)
    assert [event.number for event in ledger.recording.stop()] == [7, 8, 9, 10]


def test_a_recording_may_be_taken_by_another_thread_meanwhile() -> None:
    ledger = Ledger()
    ledger.recording.start()
    thread = threading.Thread(target=lambda: [record(ledger) for _ in range(20_000)])
    thread.start()
    taken: list[Event] = []
    while thread.is_alive():
        taken += ledger.recording.take(100)
    thread.join()
    taken += ledger.recording.stop()
    assert [event.number for event in taken] == list(range(1, 20_001))


class Kernel:
    """Stands for one that makes collectives: tells a ledger of ``num`` like them, at times of the test's own."""

    def __init__(self, ledger: Ledger, num: int) -> None:
        self._progress = np.zeros(2, dtype=np.int64)
        self._stamps_ns = np.zeros((num, 2), dtype=np.int64)
        ledger.begin_series(
            Series(
                op="all_reduce",
                algorithm="one-shot",
                phase="decode",
                num_bytes=1152,
                bytes_sent=10,
                sites=[f"o_proj {index}" for index in range(num)],
                first_number=ledger.number,
                progress=self._progress,
                stamps_ns=self._stamps_ns,
            )
        )

    def begin(self, at_s: float) -> None:
        self._stamps_ns[self._progress[0], 0] = round(at_s * 1e9)
        self._progress[0] += 1

    def end(self, at_s: float) -> None:
        self._stamps_ns[self._progress[1], 1] = round(at_s * 1e9)
        self._progress[1] += 1

    def run(self, num: int, first_s: float = 1.0, seconds: float = 0.5) -> None:
        for at_s in range(num):
            self.begin(first_s + at_s)
            self.end(first_s + at_s + seconds)


def test_a_series_is_told_of_while_it_runs_and_counted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    record(ledger)
    kernel = Kernel(ledger, 3)
    assert (ledger.number, ledger.begun, ledger.last()) == (1, None, "all_reduce ring 64 B, #1")
    kernel.begin(2.0)
    monkeypatch.setattr("tightwire.comm.ledger.ledger.perf_counter", lambda: 2.25)
    assert (ledger.number, ledger.begun) == (2, ("all_reduce", "one-shot", 1152, 2, 2.0, "decode", "o_proj 0"))
    assert ledger.current() == "all_reduce one-shot 1152 B, #2, 0.2 s"
    kernel.end(2.5)
    kernel.begin(3.0)
    kernel.end(3.25)
    assert (ledger.number, ledger.current(), ledger.last()) == (3, None, "all_reduce one-shot 1152 B, #3")
    kernel.begin(4.0)
    kernel.end(5.0)

    assert ledger.end_series() == 30
    assert (ledger.number, ledger.begun, ledger.last()) == (4, None, "all_reduce one-shot 1152 B, #4")
    count = ledger.counters.counts()[1]
    assert count[:5] == ("all_reduce", "one-shot", "decode", 3, 30) and count.exact_bytes == 30
    assert (count.seconds, count.message_bytes, count.codec_seconds) == (1.75, 3 * 1152, 0.0)
    assert ledger.counters.latencies()[1][3:] == pytest.approx((5e5, 1e6))
    record(ledger)
    assert ledger.last() == "all_reduce ring 64 B, #5"


def test_a_series_that_failed_leaves_the_collective_that_it_was_at() -> None:
    ledger = Ledger()
    kernel = Kernel(ledger, 5)
    kernel.run(2)
    kernel.begin(3.0)
    assert ledger.end_series() == 20
    assert ledger.counters.counts()[0].calls == 2
    assert ledger.begun == ("all_reduce", "one-shot", 1152, 3, 3.0, "decode", "o_proj 2") and ledger.number == 3


@pytest.mark.parametrize("sizes", [(60, 500, 500), (700,), (512, 100), (1, 1, 511)])
def test_quantiles_after_series_are_of_the_newest_calls(sizes: tuple[int, ...]) -> None:
    ledger = Ledger()
    for number, size in enumerate(sizes):
        kernel = Kernel(ledger, size)
        kernel.run(size, seconds=0.25 if number == len(sizes) - 1 else 0.5)
        ledger.end_series()
    assert ledger.counters.counts()[0].calls == sum(sizes)
    newest, older = sizes[-1], sum(sizes) - sizes[-1]
    (latency,) = ledger.counters.latencies()
    assert (latency.p50_us, latency.p99_us) == (
        250_000 if newest > 256 else 500_000,
        250_000 if newest >= 507 or not older else 500_000,
    )


def test_a_recording_holds_a_series_from_its_start_to_its_end() -> None:
    ledger = Ledger()
    kernel = Kernel(ledger, 6)
    now_s = time.perf_counter()
    kernel.run(1, now_s - 3)
    ledger.recording.start()
    for after_s in (1, 2):
        kernel.begin(now_s + after_s)
        kernel.end(now_s + after_s + 0.5)
    kernel.begin(now_s + 3)
    events = ledger.recording.stop()
    assert [(event.number, event.site, event.finished) for event in events] == [
        (2, "o_proj 1", True),
        (3, "o_proj 2", True),
        (4, "o_proj 3", False),
    ]
    assert events[0][5:8] == (1152, 10, 10)
    assert (events[0].start_s, events[0].seconds) == pytest.approx((now_s + 1, 0.5))
    kernel.end(now_s + 4)
    ledger.end_series()
    assert ledger.recording.take(10) == []


def test_a_series_that_ends_while_a_recording_does_is_in_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.recording.start()
    kernel, take_events = Kernel(ledger, 2), ledger.recording.take
    kernel.run(2, time.perf_counter())

    def take_after_the_end(at_most: int) -> list[Event]:
        ledger.end_series()
        return take_events(at_most)

    monkeypatch.setattr(ledger.recording, "take", take_after_the_end)
    assert [event.number for event in ledger.recording.stop()] == [1, 2]
