"""The base of node 0 (``Head``) and of every other node (``Member``): beats, held ports, and the end of all nodes."""

import asyncio
import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tightwire.comm.group.host import available_host_bytes
from tightwire.comm.link.probe import answer_probes
from tightwire.server.hosts.base import Hosts, Listener
from tightwire.server.hosts.channel import Channel
from tightwire.server.hosts.messages import Beat, End, Hello, Message
from tightwire.server.hosts.place import HostPlace, listen

SHOW_S = 1.0  # between reports of who has joined
_BEAT_S = 1.0
# From a failure to the end of this process, also if connections or full cores delay its orderly end: with
# --rank-timeout-s 10 the processes of all hosts end within 15 s. The ranks end with this process.
_MOST_END_S = 3.0


@dataclass(frozen=True, slots=True)
class Joining:
    """What a node brings to the others. ``ranks``: those on this node. ``facts``: by name, equal on all nodes."""

    place: HostPlace
    ranks: range
    facts: dict[str, str]
    listener: Listener
    silence_s: float
    join_timeout_s: float
    secret: bytes = b""  # shared by all hosts; empty: none

    def hello(self) -> Hello:
        place = self.place
        ports, memory_bytes = place.listens(self.ranks), available_host_bytes()
        return Hello(place.node, place.address, place.interface, ports, self.facts, memory_bytes)


class Side(Hosts, ABC):
    def __init__(self, joining: Joining, watched: range) -> None:
        super().__init__(watched, None, joining.listener)
        self._joining, self._place = joining, joining.place
        self._held: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._last_moment: threading.Timer | None = None

    def node_of(self, rank: int) -> str:
        return f"node {rank // len(self._joining.ranks)}"

    def fail(self, code: int, reason: str) -> None:
        """Begin to end all nodes with this exit code, and end this process soon in any case. The first call counts."""
        if self._ending is None:
            self._last_moment = threading.Timer(_MOST_END_S, os._exit, [code])
            self._last_moment.daemon = True
            self._last_moment.start()
            self._ending = asyncio.create_task(self._end(End(code, reason)))

    async def close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(End(0, "")))
        await asyncio.wait([self._ending])
        if self._last_moment is not None:
            self._last_moment.cancel()

    @property
    def _closing(self) -> bool:
        return self._ending is not None

    @abstractmethod
    def _channels(self) -> Sequence[Channel]:
        """The connections to the other nodes."""

    def _tell(self, message: Message) -> None:
        for channel in self._channels():
            channel.send(message)

    async def _end(self, end: End) -> None:
        self._tell(end)
        for task in self._tasks:
            task.cancel()
        self._free_ports()
        await asyncio.gather(*(channel.close() for channel in self._channels()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_task_end)
        self._tasks = [*(own for own in self._tasks if not own.done()), task]

    def _note_task_end(self, task: asyncio.Task[None]) -> None:
        """End all nodes if a task fails: nobody else would notice that its work is not done."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._closing:
            own = f"node {self._place.node} ({self._place.address})"
            self._listener.note_end(own, 1, f"failed: {type(error).__name__}: {error}")

    async def _beat(self) -> None:
        while True:
            self._tell(Beat())
            await asyncio.sleep(_BEAT_S)

    def _hold_ports(self) -> None:
        """Listen where this node's ranks will, and answer probes there. ValueError: a port is taken."""
        for port in self._joining.hello().ports:
            if self._place.node or port != self._place.store_port:  # where rank 0's store listens already
                self._held.append(listen(self._place.address, port))
                answer_probes(self._held[-1])

    def _free_ports(self) -> None:
        for held in self._held:
            with contextlib.suppress(OSError):  # closed before
                held.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts on it
            held.close()
