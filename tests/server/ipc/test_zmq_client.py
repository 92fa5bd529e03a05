"""The client against a rank 0 that the test plays: what is sent, what comes back to whom, and every way of saying no."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from tightwire.comm.ledger.ledger import Latency
from tightwire.comm.ledger.recording import Event, RankEvents
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.ipc.channels import bind_receiver, connect_sender, make_address
from tightwire.server.ipc.engine_client import EngineUnavailableError, Phase, QueueFullError
from tightwire.server.ipc.engine_stats import EngineCounters, EngineStats, ReplicaLoad
from tightwire.server.ipc.messages import (
    AddRequest,
    CancelRequest,
    CommSetup,
    FromRank,
    Heartbeat,
    Output,
    Ready,
    Record,
    Recorded,
    StepResult,
    Stop,
    ToEngine,
    ToReporter,
)
from tightwire.server.ipc.zmq_client import ZmqEngineClient

STATS = EngineStats(
    loads=[ReplicaLoad(num_running=1, num_waiting=0, num_blocks=8, num_free_blocks=7)],
    counters=EngineCounters(num_steps=3, num_prompt_tokens=5, num_generation_tokens=2),
)


class FakeRank:
    """Rank 0 without an engine."""

    def __init__(self, inbox: str, parent: str, reporter: str) -> None:
        self._context = zmq.asyncio.Context()
        self._receiver = bind_receiver(self._context, inbox)
        self._reporter = bind_receiver(self._context, reporter)
        self._sender = connect_sender(zmq.Context(self._context), parent)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    async def receive(self) -> ToEngine:
        return self._decoder.decode(await asyncio.wait_for(self._receiver.recv(), 5))

    async def asked(self) -> ToReporter:
        return msgspec.msgpack.decode(await asyncio.wait_for(self._reporter.recv(), 5), type=ToReporter)

    def send(self, message: FromRank) -> None:
        self._sender.send(msgspec.msgpack.encode(message))

    def put_out(self, *outputs: Output) -> None:
        self.send(StepResult(outputs=list(outputs), stats=STATS))

    def close(self) -> None:
        self._receiver.close(linger=0)
        self._reporter.close(linger=0)
        self._sender.close(linger=0)
        self._context.term()


@pytest.fixture
async def addresses() -> tuple[str, str, str]:
    return make_address("engine"), make_address("parent"), make_address("reporter")


@pytest.fixture
async def reports() -> list[FromRank]:
    return []


@pytest.fixture
async def client(addresses: tuple[str, str, str], reports: list[FromRank]) -> AsyncIterator[ZmqEngineClient]:
    client = ZmqEngineClient(
        to_engine=addresses[0],
        from_ranks=addresses[1],
        reporters=[addresses[2]],
        max_queued_requests=4,
        on_report=reports.append,
    )
    client.open()
    client.set_phase(Phase.READY)
    yield client
    client.close()


@pytest.fixture
async def rank(addresses: tuple[str, str, str], client: ZmqEngineClient) -> AsyncIterator[FakeRank]:
    rank = FakeRank(*addresses)
    yield rank
    rank.close()


def request(id: str) -> AddRequest:
    return AddRequest(id=id, prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=4))


def token(id: str, token_id: int, finish_reason: str | None = None) -> Output:
    return Output(id=id, token_ids=[token_id], finish_reason=finish_reason)


async def collect(stream: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in stream]


def start(stream: AsyncIterator[Output]) -> asyncio.Task[list[Output]]:
    return asyncio.create_task(collect(stream))


async def test_outputs_reach_the_stream_that_asked(client: ZmqEngineClient, rank: FakeRank) -> None:
    first, second = start(client.submit([request("a"), request("b")])), start(client.submit([request("c")]))
    assert [await rank.receive() for _ in "abc"] == [request("a"), request("b"), request("c")]
    rank.put_out(token("a", 1), token("c", 2))
    rank.put_out(token("b", 3, "stop"), token("a", 4, "length"))
    rank.put_out(token("c", 5, "stop"))
    assert await asyncio.wait_for(first, 5) == [token("a", 1), token("b", 3, "stop"), token("a", 4, "length")]
    assert await asyncio.wait_for(second, 5) == [token("c", 2), token("c", 5, "stop")]
    assert client.num_live == 0 and await client.wait_idle(0.1)
    assert client.stats == STATS


async def test_other_messages_are_reports(client: ZmqEngineClient, rank: FakeRank, reports: list[FromRank]) -> None:
    beat = Heartbeat(rank=0, step=1, doing="idle", busy_s=0)
    rank.send(beat)
    async with asyncio.timeout(5):
        while reports != [beat]:
            await asyncio.sleep(0.01)


async def test_what_rank_0_says_of_its_collectives_is_kept(client: ZmqEngineClient, rank: FakeRank) -> None:
    assert client.comm_setup is None and list(client.comm_latencies) == []
    setup, latency = (
        CommSetup(transport="shared-memory", num_nodes=1),
        Latency("all_reduce", "ring", "decode", 3.0, 9.0),
    )
    for number in (1, 0, 1):
        comm, latencies = (setup, [latency]) if number == 0 else (None, [])
        rank.send(Ready(rank=number, peak_host_bytes=1, comm=comm))
        rank.send(Heartbeat(rank=number, step=1, doing="idle", busy_s=0, latencies=latencies))
    async with asyncio.timeout(5):
        while not client.comm_latencies:
            await asyncio.sleep(0.01)
    assert (client.comm_setup, list(client.comm_latencies)) == (setup, [latency])


async def test_a_recording_is_asked_of_the_reporters(client: ZmqEngineClient, rank: FakeRank) -> None:
    recording = asyncio.create_task(client.record_collectives(0.5))
    asked = await rank.asked()
    assert isinstance(asked, Record) and asked.seconds == 0.5
    event = Event("all_reduce", "ring", "decode", "", 7, 8, 8, 8, 1.0, 0.1)
    rank.send(Recorded(rank=0, id=asked.id, row=0, events=[event], clock="host", last=True))
    assert await recording == [RankEvents(rank=0, clock="host", events=[event])]


async def test_death_ends_a_recording_and_refuses_the_next(client: ZmqEngineClient, rank: FakeRank) -> None:
    recording = asyncio.create_task(client.record_collectives(30.0))
    await rank.asked()
    client.set_phase(Phase.DEAD, "rank 1 (pid 7) was killed")
    for waiting in (recording, client.record_collectives(1.0)):
        with pytest.raises(EngineUnavailableError, match=r"rank 1 \(pid 7\) was killed"):
            await asyncio.wait_for(waiting, 5)


async def test_the_end_of_the_engine_ends_a_recording_and_the_load_of_an_adapter(
    client: ZmqEngineClient, rank: FakeRank
) -> None:
    questions = [asyncio.create_task(client.record_collectives(30.0)), asyncio.create_task(client.load_adapter(1, "a"))]
    await rank.asked()
    client.set_phase(Phase.DRAINING)
    client.stop_engine()
    for waiting in questions:
        with pytest.raises(EngineUnavailableError, match="the server is shutting down"):
            await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(
    ("phase", "reason", "message"),
    [
        (Phase.LOADING, "weights 40 %", "still loading: weights 40 %"),
        (Phase.DRAINING, "", "shutting down"),
        (Phase.DEAD, "rank 1 fell", "has failed: rank 1 fell"),
        (Phase.READY, "this is node 1; send requests to node 0", "^this is node 1; send requests to node 0$"),
    ],
)
async def test_only_a_ready_engine_takes_requests(
    client: ZmqEngineClient, phase: Phase, reason: str, message: str
) -> None:
    client.set_phase(phase, reason)
    with pytest.raises(EngineUnavailableError, match=message):
        client.submit([request("a")])


async def test_the_queue_is_bounded_and_takes_all_or_none(client: ZmqEngineClient, rank: FakeRank) -> None:
    running = start(client.submit([request("a"), request("b"), request("c")]))
    await rank.receive()
    with pytest.raises(QueueFullError, match=r"3 sequences wait or run and 2 more would exceed the limit of 4"):
        client.submit([request("d"), request("e")])
    assert client.num_live == 3
    rank.put_out(token("a", 1, "stop"), token("b", 1, "stop"), token("c", 1, "stop"))
    await asyncio.wait_for(running, 5)
    accepted = start(client.submit([request("d"), request("e")]))
    await asyncio.sleep(0)
    assert client.num_live == 2
    rank.put_out(token("d", 1, "stop"), token("e", 1, "stop"))
    await asyncio.wait_for(accepted, 5)


async def test_the_queue_is_checked_again_when_a_stream_begins(client: ZmqEngineClient, rank: FakeRank) -> None:
    late = client.submit([request("x"), request("y")])
    running = start(client.submit([request(id) for id in "abc"]))
    await rank.receive()
    with pytest.raises(QueueFullError):
        await anext(late)
    client.set_phase(Phase.DEAD, "over")
    with pytest.raises(EngineUnavailableError):
        await running


async def test_death_ends_every_stream_with_the_reason(client: ZmqEngineClient, rank: FakeRank) -> None:
    streams = [start(client.submit([request(id)])) for id in "ab"]
    rank.put_out(token("a", 1))
    await asyncio.sleep(0.05)
    client.set_phase(Phase.DEAD, "rank 1 (pid 7) was killed")
    for stream in streams:
        with pytest.raises(EngineUnavailableError, match=r"rank 1 \(pid 7\) was killed"):
            await asyncio.wait_for(stream, 5)
    client.set_phase(Phase.READY)
    assert client.state.phase is Phase.DEAD
    assert client.num_live == 0


async def test_a_stream_closed_early_cancels_what_still_runs(client: ZmqEngineClient, rank: FakeRank) -> None:
    stream = client.submit([request("a"), request("b")])
    first = asyncio.ensure_future(anext(stream))
    assert [await rank.receive() for _ in range(2)] == [request("a"), request("b")]
    rank.put_out(token("a", 1, "stop"))
    assert await asyncio.wait_for(first, 5) == token("a", 1, "stop")
    await stream.aclose()  # type: ignore[attr-defined]
    assert await rank.receive() == CancelRequest(ids=["b"])
    assert client.num_live == 1  # until the engine has let go of it
    rank.put_out(token("b", 2), Output(id="b", token_ids=[], finish_reason="cancelled"))
    assert await client.wait_idle(5)


async def test_cancel_tells_the_engine_and_the_stream_gets_its_end(client: ZmqEngineClient, rank: FakeRank) -> None:
    stream = start(client.submit([request("a")]))
    await rank.receive()
    client.cancel(["a", "unknown"])
    assert await rank.receive() == CancelRequest(ids=["a"])
    end = Output(id="a", token_ids=[], finish_reason="cancelled")
    rank.put_out(end)
    assert await asyncio.wait_for(stream, 5) == [end]


async def test_stop_comes_after_what_was_sent_before(client: ZmqEngineClient, rank: FakeRank) -> None:
    stream = start(client.submit([request("a")]))
    await asyncio.sleep(0)
    client.cancel_all()
    client.stop_engine()
    assert [await rank.receive() for _ in range(3)] == [request("a"), CancelRequest(ids=["a"]), Stop()]
    assert not await client.wait_idle(0.01)
    stream.cancel()


async def test_requests_wait_for_an_engine_that_binds_late(
    client: ZmqEngineClient, addresses: tuple[str, str, str]
) -> None:
    stream = start(client.submit([request("a")]))
    await asyncio.sleep(0.05)
    rank = FakeRank(*addresses)
    assert await rank.receive() == request("a")
    rank.close()
    stream.cancel()
