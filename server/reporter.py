"""A rank's voice: messages to the parent, and a heartbeat that goes on while the rank computes or hangs.

The heartbeat has a thread and a socket of its own (zmq sockets belong to one thread). It says what the rank is doing
and for how long, so that the parent can tell slow from stuck and name the collective that did not come back.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import zmq

from tightwire.server.channels import connect_sender
from tightwire.server.messages import FromRank, Heartbeat, Stage

HEARTBEAT_PERIOD_S = 0.5
_LINGER_MS = 2000  # the last words of a failing rank
_MIN_PROGRESS_STEP = 0.02


class Reporter:
    """Sends to the parent. All methods but the heartbeat's own are for the rank's main thread.

    ``current_collective`` may be set to ``group.ledger.current`` once there is a group.
    """

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.current_collective: Callable[[], str | None] = lambda: None
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = connect_sender(self._context, address)
        self._activity: tuple[str, int, float | None] = ("starting", -1, time.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(address,), name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def doing(self) -> str:
        """What this rank does now, in words: the stage or step, and the collective inside it."""
        doing, step, _ = self._activity
        collective = self.current_collective()
        words = doing if step < 0 else f"{doing} {step}"
        return f"{words}: {collective}" if collective else words

    def begin(self, doing: str, step: int = -1) -> None:
        """From now on this rank does ``doing``; a step of the engine gives its number."""
        self._activity = (doing, step, time.monotonic())

    def idle(self) -> None:
        """Nothing to do: being silent about progress is no sign of a hang."""
        self._activity = ("idle", -1, None)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[float], None]]:
        """A stage of start-up, reported and timed; yields what takes its fraction done."""
        self.begin(name)
        start = time.monotonic()
        self.send(Stage(rank=self.rank, name=name, fraction=0.0))
        reported = 0.0

        def progress(fraction: float) -> None:
            nonlocal reported
            if fraction - reported >= _MIN_PROGRESS_STEP:
                reported = fraction
                self.send(Stage(rank=self.rank, name=name, fraction=fraction))

        yield progress
        self.send(Stage(rank=self.rank, name=name, fraction=1.0, seconds=time.monotonic() - start))

    def send(self, message: FromRank) -> None:
        """Queue one message; never blocks, because a parent that does not read is about to end this process."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send what is queued, for at most two seconds."""
        self._closing.set()
        self._thread.join(timeout=2 * HEARTBEAT_PERIOD_S)
        self._socket.close(linger=_LINGER_MS)
        if not self._thread.is_alive():
            self._context.term()

    def _beat(self, address: str) -> None:
        socket = connect_sender(self._context, address)
        encoder = msgspec.msgpack.Encoder()
        while True:
            _, step, since = self._activity
            busy_s = 0.0 if since is None else time.monotonic() - since
            socket.send(encoder.encode(Heartbeat(rank=self.rank, step=step, doing=self.doing, busy_s=busy_s)))
            if self._closing.wait(HEARTBEAT_PERIOD_S):
                socket.close(linger=0)
                return
