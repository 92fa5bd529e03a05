"""Submits requests to rank 0 over zmq and routes its outputs to their streams: the HTTP process's engine client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from tightwire.comm.ledger.ledger import Latency
from tightwire.comm.ledger.recording import RankEvents
from tightwire.server.ipc import messages
from tightwire.server.ipc.channels import bind_receiver, connect_sender
from tightwire.server.ipc.engine_client import EngineState, EngineUnavailableError, Phase, QueueFullError
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest, FromRank, Output, Stop, ToEngine
from tightwire.server.ipc.rank_answers import AdapterLoads, Recordings

_Inbox = asyncio.Queue[Output | None]  # None: the engine is dead; ``state`` has the reason


class ZmqEngineClient:
    """Implements ``EngineClient``. Binds ``from_ranks``. ``on_report`` gets all but step results and recordings."""

    def __init__(
        self,
        *,
        to_engine: str,
        from_ranks: str,
        max_queued_requests: int,
        reporters: Sequence[str],
        num_ranks: int = 1,
        first_rank: int = 0,
        on_report: Callable[[FromRank], None] = lambda message: None,
    ) -> None:
        """``first_rank``: the first of this host's ranks, whose report on collectives is shown."""
        self._max_queued_requests = max_queued_requests
        self._first_rank, self._on_report = first_rank, on_report
        self.state = EngineState(phase=Phase.LOADING, reason="starting")
        self.stats: EngineStats | None = None
        self.comm_setup: messages.CommSetup | None = None
        self.comm_latencies: Sequence[Latency] = ()
        self._live: dict[str, _Inbox | None] = {}  # None: cancelled, without a reader
        self._empty = asyncio.Event()
        self._empty.set()
        self._context = zmq.asyncio.Context()
        self._receiver: zmq.asyncio.Socket = bind_receiver(self._context, from_ranks)
        self._sender = connect_sender(zmq.Context(self._context), to_engine)
        self._to_reporters = [connect_sender(zmq.Context(self._context), address) for address in reporters]
        self._recordings = Recordings(range(first_rank, first_rank + len(reporters)), self._ask_reporters)
        self._adapter_loads = AdapterLoads(num_ranks, self._send)
        # Takes a rank's answer to a load, also one that another host relays.
        self.heard_adapter = self._adapter_loads.heard
        self._encoder = msgspec.msgpack.Encoder()
        self._receiving: asyncio.Task[None] | None = None

    def open(self) -> asyncio.Task[None]:
        """Start listening to the ranks; needs a running loop. The task ends only by ``close`` or by an error."""
        self._receiving = asyncio.create_task(self._receive(), name="engine client")
        return self._receiving

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        for socket in (self._receiver, self._sender, *self._to_reporters):
            socket.close(linger=0)
        self._context.term()

    async def record_collectives(self, seconds: float) -> list[RankEvents]:
        if self.state.phase in (Phase.LOADING, Phase.DEAD):
            raise EngineUnavailableError(str(self.state))
        return await self._recordings.record(seconds)

    @property
    def num_live(self) -> int:
        """Sequences the engine has not finished."""
        return len(self._live)

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        """Set the engine's phase. ``DEAD`` is final and ends every stream with the reason."""
        if self.state.phase is Phase.DEAD:
            return
        self.state = EngineState(phase=phase, reason=reason)
        if phase is Phase.DEAD:
            for inbox in filter(None, self._live.values()):
                inbox.put_nowait(None)
            self._live.clear()
            self._empty.set()
            self._fail_questions()

    def submit(self, requests: Sequence[AddRequest]) -> AsyncIterator[Output]:
        """Refuses at once; sends accepted requests when the first output is awaited."""
        self._admit(requests)
        return self._stream(requests)

    async def load_adapter(self, adapter: int, folder: str) -> str:
        self._require_ready()
        return await self._adapter_loads.load(adapter, folder)

    def unload_adapter(self, adapter: int) -> None:
        self._require_ready()
        self._send(messages.UnloadAdapter(id=adapter))

    def cancel(self, ids: Sequence[str]) -> None:
        if known := [id for id in ids if id in self._live]:
            self._send(messages.CancelRequest(ids=known))

    def cancel_all(self) -> None:
        self.cancel(list(self._live))

    def stop_engine(self) -> None:
        """Ask the ranks to leave their loops and exit. They answer no more questions."""
        self._fail_questions()
        self._send(Stop())

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every sequence finishes within ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._empty.is_set()

    def _fail_questions(self) -> None:
        self._recordings.fail(str(self.state))
        self._adapter_loads.fail(str(self.state))

    def _require_ready(self) -> None:
        if self.state.phase is not Phase.READY:
            raise EngineUnavailableError(str(self.state))
        if self.state.reason:  # another host serves the API
            raise EngineUnavailableError(self.state.reason)

    def _admit(self, requests: Sequence[AddRequest]) -> None:
        self._require_ready()
        if self.num_live + len(requests) > self._max_queued_requests:
            limit = f"the limit of {self._max_queued_requests} (--max-queued-requests); try again later"
            more = f"{len(requests)} more would exceed {limit}"
            raise QueueFullError(f"{self.num_live} sequences wait or run and {more}")

    async def _stream(self, requests: Sequence[AddRequest]) -> AsyncIterator[Output]:
        self._admit(requests)
        inbox: _Inbox = asyncio.Queue()
        pending = {request.id for request in requests}
        assert len(pending) == len(requests) and pending.isdisjoint(self._live), "request ids must be unique"
        for request in requests:
            self._live[request.id] = inbox
            self._send(request)
        self._empty.clear()
        try:
            while pending:
                output = await inbox.get()
                if output is None:
                    pending.clear()
                    raise EngineUnavailableError(str(self.state))
                if output.finish_reason is not None:
                    pending.discard(output.id)
                yield output
        finally:
            # Cancel sequences without a reader; they count as live until the engine reports their end.
            gone = [id for id in pending if id in self._live]
            self._live |= dict.fromkeys(gone)
            self.cancel(gone)

    def _send(self, message: ToEngine) -> None:
        if self._sender.closed:
            return  # a stream closed after shutdown has nothing left to cancel
        self._sender.send(self._encoder.encode(message))

    def _ask_reporters(self, message: messages.Record) -> None:
        encoded = self._encoder.encode(message)
        for reporter in self._to_reporters:
            reporter.send(encoded)

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromRank)
        while True:
            message = decoder.decode(await self._receiver.recv())
            if isinstance(message, messages.StepResult):
                self.stats = message.stats
                for output in message.outputs:
                    self._route(output)
            elif isinstance(message, messages.Recorded):
                self._recordings.heard(message)
            else:
                # The other ranks report nearly the same on their collectives.
                if isinstance(message, messages.Heartbeat) and message.rank == self._first_rank:
                    self.comm_latencies = message.latencies
                elif isinstance(message, messages.Ready) and message.rank == self._first_rank:
                    self.comm_setup = message.comm
                self._on_report(message)

    def _route(self, output: Output) -> None:
        if (inbox := self._live.get(output.id)) is not None:
            inbox.put_nowait(output)
        if output.finish_reason is not None:
            self._live.pop(output.id, None)
        if not self._live:
            self._empty.set()
