"""Sends a rank's messages to the parent, and a heartbeat that continues while the rank computes or hangs.

The heartbeat's thread says what the rank is doing and for how long, and records collectives when the parent asks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.ledger.recording import Event, clock_name
from tightwire.server.ipc.channels import bind_receiver, connect_sender
from tightwire.server.ipc.messages import FromRank, Heartbeat, Hush, Record, Recorded, Stage, ToReporter

HEARTBEAT_PERIOD_S = 0.5
_LINGER_MS = 60_000  # for the last messages of a failing rank, to a parent that may still be importing
_MIN_PROGRESS_STEP = 0.02
_EVENTS_PER_PART = 4096  # about a millisecond to encode, during which the rank's other threads wait


class Reporter:
    """Sends the main thread's messages. The caller replaces ``ledger``, ``other_ledgers`` (whose times are told too), ``num_fetched`` and ``num_choice_gathers``."""

    def __init__(self, rank: int, address: str, inbox: str) -> None:
        self.rank = rank
        self.ledger, self.other_ledgers = Ledger(), list[Ledger]()
        self.num_fetched: Callable[[], int] = lambda: 0  # parts of weights and cache fetched since the start
        self.num_choice_gathers: Callable[[], int] = lambda: 0  # gathers of tokens begun since the start
        self._encoder, self._context = msgspec.msgpack.Encoder(), zmq.Context()
        self._socket = connect_sender(self._context, address)
        self._inbox_address = inbox
        self._activity: tuple[str, int, float | None] = ("starting", -1, time.monotonic())
        self._thread = threading.Thread(target=self._beat, args=(address,), name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def doing(self) -> str:
        """What this rank is doing: a stage, or a step with its current or previous collective."""
        doing, step, since = self._activity
        words = doing if step < 0 else f"{doing} {step}"
        if current := self.ledger.current():
            return f"{words}: {current}"
        serving = step >= 0 or since is None
        return f"{words}, after {last}" if serving and (last := self.ledger.last()) else words

    def begin(self, doing: str, step: int = -1) -> None:
        """Report ``doing`` from now on; ``step``: the number of an engine step."""
        self._activity = (doing, step, time.monotonic())

    def idle(self) -> None:
        """Nothing to do: a lack of progress is no sign of a hang."""
        self._activity = ("idle", -1, None)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[float], None]]:
        """Report a start-up stage; yields a function that takes the fraction done."""
        self.begin(name)
        self.send(Stage(rank=self.rank, name=name, fraction=0.0))
        reported = 0.0

        def progress(fraction: float) -> None:
            nonlocal reported
            if fraction - reported >= _MIN_PROGRESS_STEP:
                reported = fraction
                self.send(Stage(rank=self.rank, name=name, fraction=fraction))

        yield progress
        self.begin(f"{name}, done")  # no longer in a warm-up step, which has no time limit
        self.send(Stage(rank=self.rank, name=name, fraction=1.0))

    def send(self, message: FromRank) -> None:
        """Queue one message. Never blocks: if the parent does not read, it is about to end this process."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send what is queued, for at most a minute."""
        waker = connect_sender(self._context, self._inbox_address)
        waker.send(self._encoder.encode(Hush()))
        self._thread.join(timeout=2 * HEARTBEAT_PERIOD_S)
        waker.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        if not self._thread.is_alive():
            self._context.term()

    def _beat(self, address: str) -> None:
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToReporter)
        with (
            connect_sender(self._context, address) as socket,
            bind_receiver(self._context, self._inbox_address) as inbox,
        ):

            def send(message: Heartbeat | Recorded) -> None:
                socket.send(encoder.encode(message))

            recorder = Recorder(self.rank, send)
            next_beat_s = time.monotonic()
            while True:
                if time.monotonic() >= next_beat_s:
                    send(self._heartbeat())
                    next_beat_s = time.monotonic() + HEARTBEAT_PERIOD_S
                recorder.pump(time.monotonic())
                wake_s = min(next_beat_s, recorder.end_s or next_beat_s)
                if not inbox.poll(max(0, round(1000 * (wake_s - time.monotonic())) + 1)):
                    continue
                message = decoder.decode(inbox.recv())
                if isinstance(message, Hush):
                    return
                recorder.start(message, (self.ledger, *self.other_ledgers), time.monotonic())

    def _heartbeat(self) -> Heartbeat:
        _, step, since = self._activity
        return Heartbeat(
            rank=self.rank,
            step=step,
            doing=self.doing,
            busy_s=0.0 if since is None else time.monotonic() - since,
            num_collectives=self.ledger.number,
            num_choice_gathers=self.num_choice_gathers(),
            num_fetched=self.num_fetched(),
            latencies=[each for own in (self.ledger, *self.other_ledgers) for each in own.counters.latencies()],
        )


class Recorder:
    """Sends recorded collectives to the parent in parts. One recording at a time; call ``pump`` regularly, and at ``end_s``."""

    def __init__(self, rank: int, send: Callable[[Recorded], None]) -> None:
        self._rank, self._send = rank, send
        self._request: Record | None = None
        self._ledgers: Sequence[Ledger] = ()
        self.end_s: float | None = None  # when the current recording ends, on the caller's clock

    def start(self, request: Record, ledgers: Sequence[Ledger], now_s: float) -> None:
        """Begin this recording, with a row for each ledger; discards the current one."""
        for ledger in self._ledgers:
            ledger.recording.stop()
        self._request, self._ledgers, self.end_s = request, ledgers, now_s + request.seconds
        for ledger in ledgers:
            ledger.recording.start()

    def pump(self, now_s: float) -> None:
        """Send what has been recorded; at the end of the time, the last part."""
        if self._request is None or self.end_s is None:
            return
        for row, ledger in enumerate(self._ledgers):
            events = ledger.recording.stop() if now_s >= self.end_s else ledger.recording.take(1 << 16)
            for start in range(0, len(events), _EVENTS_PER_PART):
                self._send_part(self._request, row, events[start : start + _EVENTS_PER_PART])
        if now_s >= self.end_s:
            self._send_part(self._request, 0, [], last=True)
            self._request = self.end_s = None

    def _send_part(self, request: Record, row: int, events: list[Event], last: bool = False) -> None:
        self._send(Recorded(rank=self._rank, id=request.id, row=row, events=events, clock=clock_name(), last=last))
