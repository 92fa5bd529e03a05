"""The Chrome trace: a row per rank, a bar per collective, times that can be compared or a word that they cannot."""

import json

from tightwire.comm.ledger.recording import Event, RankEvents, chrome_trace, clock_name


def event(number: int, start_s: float, *, finished: bool = True, site: str = "") -> Event:
    sent = 2304 if finished else 0
    return Event("all_reduce", "flash-int8", "prefill", site, number, 4608, sent, 4608, start_s, 0.0005, finished)


def bars(trace: dict[str, object], rank: int) -> list[dict[str, object]]:
    events = trace["traceEvents"]
    assert isinstance(events, list)
    return [entry for entry in events if entry["ph"] == "X" and entry["pid"] == rank]


def names(trace: dict[str, object]) -> list[str]:
    events = trace["traceEvents"]
    assert isinstance(events, list)
    return [entry["args"]["name"] for entry in events if entry["name"] == "process_name"]


def test_a_bar_has_its_time_bytes_number_and_site() -> None:
    parts = [RankEvents(rank=0, clock="a", events=[event(7, 100.25, site="o_proj 3")])]
    trace = json.loads(json.dumps(chrome_trace(parts)))
    assert bars(trace, 0) == [
        {
            "ph": "X",
            "name": "all_reduce flash-int8",
            "cat": "prefill",
            "pid": 0,
            "tid": 0,
            "ts": 0,
            "dur": 500,
            "args": {
                "number": 7,
                "message_bytes": 4608,
                "bytes_sent": 2304,
                "exact_bytes": 4608,
                "phase": "prefill",
                "site": "o_proj 3",
            },
        }
    ]
    assert names(trace) == ["rank 0"] and trace["otherData"]["clocks"] == "one"


def test_ranks_of_one_host_share_an_origin() -> None:
    parts = [
        RankEvents(rank=0, clock="a", events=[event(1, 50.0), event(2, 50.001)]),
        RankEvents(rank=1, clock="a", events=[event(1, 49.999), event(2, 50.0015)]),
    ]
    trace = chrome_trace(parts)
    assert [bar["ts"] for bar in bars(trace, 0)] == [1000, 2000]
    assert [bar["ts"] for bar in bars(trace, 1)] == [0, 2500]


def test_clocks_of_two_hosts_are_told_apart_and_not_compared() -> None:
    parts = [
        RankEvents(rank=0, clock="a", events=[event(1, 50.0)]),
        RankEvents(rank=1, clock="b", events=[event(1, 90_000.0)]),
    ]
    trace = chrome_trace(parts)
    assert [bars(trace, rank)[0]["ts"] for rank in (0, 1)] == [0, 0]
    assert names(trace) == ["rank 0 (clock of a)", "rank 1 (clock of b)"]
    assert "do not compare" in trace["otherData"]["clocks"]


def test_messages_of_other_connections_are_a_row_below_the_collectives() -> None:
    parts = [
        RankEvents(rank=0, clock="a", events=[event(1, 50.0), event(2, 50.001)]),
        RankEvents(rank=0, row=1, clock="a", events=[event(7, 50.0005), event(9, 50.0008)]),
    ]
    trace = chrome_trace(parts)
    assert [bar["tid"] for bar in bars(trace, 0)] == [0, 0, 1, 1]
    rows = [entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "thread_name"]
    assert rows == ["collectives", "messages 1"]
    assert trace["otherData"]["lost"] == {"rank 0, messages 1": 1}


def test_what_had_not_ended_and_what_was_lost_is_said() -> None:
    parts = [
        RankEvents(rank=0, clock="a", events=[event(3, 1.0), event(6, 2.0), event(7, 3.0, finished=False)]),
        RankEvents(rank=1, clock="a", events=[]),
    ]
    trace = chrome_trace(parts)
    assert ["unfinished" in bar["args"] for bar in bars(trace, 0)] == [False, False, True]  # type: ignore[operator]
    assert trace["otherData"]["lost"] == {"rank 0, collectives": 2}
    assert trace["otherData"]["events"] == {"rank 0, collectives": 3, "rank 1, collectives": 0}


def test_the_clocks_name_is_the_same_for_all_processes_of_a_host() -> None:
    assert clock_name() == clock_name() != ""
