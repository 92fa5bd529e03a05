"""Putting ranks' recordings together: all or an error that names who is missing, one at a time, every wait ends."""

import asyncio

import pytest

from tightwire.comm.ledger.recording import Event
from tightwire.server.ipc.engine_client import (
    AdapterRefusedError,
    EngineUnavailableError,
    RankSilentError,
    RecordingBusyError,
)
from tightwire.server.ipc.messages import AdapterLoaded, LoadAdapter, Record, Recorded, UnloadAdapter
from tightwire.server.ipc.rank_answers import AdapterLoads, Recordings


class Asked(list[Record]):
    """What the ranks were asked for."""


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def recordings(asked: Asked) -> Recordings:
    return Recordings(range(2), asked.append, patience_s=0.2)


def part(rank: int, id: int, *numbers: int, row: int = 0, last: bool = False) -> Recorded:
    events = [Event("all_reduce", "ring", "decode", "", number, 8, 8, 8, 1.0, 0.1) for number in numbers]
    return Recorded(rank=rank, id=id, row=row, events=events, clock=f"host {rank}", last=last)


async def begin(recordings: Recordings, seconds: float = 0.1) -> asyncio.Task[list]:  # type: ignore[type-arg]
    task = asyncio.create_task(recordings.record(seconds))
    await asyncio.sleep(0)
    return task


async def test_parts_of_all_ranks_in_order(recordings: Recordings, asked: Asked) -> None:
    task = await begin(recordings)
    assert asked == [Record(id=0, seconds=0.1)]
    for message in (part(1, 0, 1), part(0, 0, 1, 2, last=True), part(1, 0, 2), part(1, 0, last=True)):
        recordings.heard(message)
    first, second = await task
    assert [event.number for event in first.events] == [event.number for event in second.events] == [1, 2]
    assert (first.rank, first.clock, second.clock) == (0, "host 0", "host 1")


async def test_each_ledger_of_a_rank_has_its_row(asked: Asked) -> None:
    recordings = Recordings(range(1), asked.append, patience_s=0.2)
    task = await begin(recordings)
    for message in (part(0, 0, 7, 8, row=1), part(0, 0, 1), part(0, 0, 9, row=1), part(0, 0, last=True)):
        recordings.heard(message)
    rows = [(own.row, [event.number for event in own.events]) for own in await task]
    assert rows == [(0, [1]), (1, [7, 8, 9])]


async def test_ranks_of_another_host_than_the_first_have_their_own_numbers(asked: Asked) -> None:
    recordings = Recordings(range(2, 4), asked.append, patience_s=0.2)
    task = await begin(recordings)
    for message in (part(3, 0, 1, last=True), part(2, 0, 1, 2, last=True)):
        recordings.heard(message)
    assert [(own.rank, own.clock, len(own.events)) for own in await task] == [(2, "host 2", 2), (3, "host 3", 1)]


async def test_a_rank_that_does_not_answer_is_named(recordings: Recordings) -> None:
    task = await begin(recordings)
    recordings.heard(part(0, 0, last=True))
    with pytest.raises(RankSilentError, match=r"^rank 1 did not send what it recorded within 0.2 s after its 0.1 s"):
        await task


async def test_one_at_a_time_and_a_late_part_of_the_one_before_is_ignored(recordings: Recordings, asked: Asked) -> None:
    task = await begin(recordings)
    with pytest.raises(RecordingBusyError, match=r"for 0\.1 s in all; try again"):
        await recordings.record(5.0)
    with pytest.raises(RankSilentError, match="rank 0, rank 1 did not"):
        await task
    again = await begin(recordings)
    recordings.heard(part(0, 0, 9, last=True))
    recordings.heard(part(0, 1, last=True))
    recordings.heard(part(1, 1, last=True))
    assert [list(rank.events) for rank in await again] == [[], []]
    assert [request.id for request in asked] == [0, 1]
    recordings.heard(part(1, 1, last=True))


async def test_death_ends_the_wait_with_its_reason(recordings: Recordings) -> None:
    recordings.fail("nobody asked")
    task = await begin(recordings, seconds=60.0)
    recordings.fail("the engine has failed: rank 1 was killed")
    with pytest.raises(EngineUnavailableError, match="rank 1 was killed"):
        await task


@pytest.mark.parametrize(
    ("second", "refusal"),
    [
        (AdapterLoaded(1, 5, digest="b"), "rank 1: has other files of the adapter than rank 0; copy them to all hosts"),
        (AdapterLoaded(1, 5, refusal="no such folder"), "rank 1: no such folder"),
    ],
)
async def test_an_adapter_that_one_rank_refuses_or_has_otherwise_is_undone(second: AdapterLoaded, refusal: str) -> None:
    sent = list[LoadAdapter | UnloadAdapter]()
    loads = AdapterLoads(2, sent.append)
    task = asyncio.create_task(loads.load(5, "/adapters/poet"))
    await asyncio.sleep(0)
    loads.heard(AdapterLoaded(0, 5, digest="a"))
    loads.heard(second)
    with pytest.raises(AdapterRefusedError, match=refusal):
        await task
    assert sent == [LoadAdapter(id=5, folder="/adapters/poet"), UnloadAdapter(id=5)]


async def test_an_adapters_digest_is_that_of_all_ranks() -> None:
    loads = AdapterLoads(2, lambda message: None)
    task = asyncio.create_task(loads.load(5, "/adapters/poet"))
    await asyncio.sleep(0)
    for rank in (1, 0):
        loads.heard(AdapterLoaded(rank, 5, digest="a"))
    assert await task == "a"
