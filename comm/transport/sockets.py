"""A transport over TCP sockets of our own, for CPU ranks between hosts: one connection for each pair, and no other thread.

A call sends and receives at the same time on non-blocking sockets, so two ranks that send long messages to each other cannot
wait for each other's buffers. A small message is one ``sendmsg`` and one ``recvmsg``. While a small one has not arrived, the
rank polls its sockets for a short time; then, and for long messages or where ranks share cores, it sleeps in the kernel.

A message follows a header of 24 bytes, which ``bytes_sent`` does not count: the number of the message between these two
ranks, its collective, its size, and its bytes on the wire, which are fewer if it is coded (``wire_codec``; ``bytes_sent`` counts its size).
The receiver compares the first three with its own call.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightwire.comm import errors
from tightwire.comm.transport import wire_codec
from tightwire.comm.transport.process_group import GlooTransport, TransferError
from tightwire.comm.transport.socket_join import Peer, SocketOptions
from tightwire.comm.transport.store_notes import FailureNotes

_HEADER = struct.Struct("<IIQQ")
HEADER_BYTES = _HEADER.size
FRAME_BYTES = 66  # the headers of a frame: Ethernet 14, IPv4 20, TCP 32 with time stamps

_MAX_NUMBER = (1 << 32) - 1
_SPIN_S = 200e-6  # a local network's round trip, and the usual difference between ranks of a decode step
# Ranks of one machine that are not bound to cores may be put on the same one. So after 20 us they offer it, and when another
# takes it they poll no more for some calls: two such ranks took 100 us for a sum instead of 300.
_OFFER_S = 20e-6
_NUM_SLEEPS = 64
_SPIN_BYTES = 64 << 10  # longer messages take longer on the wire than waking up takes
_SLEEP_S = 1.0  # until the next look at the clock
_WAKE_BYTES = 256 << 10  # a long message wakes its receiver once for so many, and not for each frame
_LAST_ACK_AT = 56  # in Linux's struct tcp_info: milliseconds since the last acknowledgement


def interface_bytes(payload_bytes: float, num_messages: float, num_frames: float) -> float:
    """Bytes that an interface counts for these messages. Frames include pure acknowledgements. It omits the payload of repeated frames."""
    return payload_bytes + HEADER_BYTES * num_messages + FRAME_BYTES * num_frames


class SocketTransport(GlooTransport):
    """Messages over ``sockets``; only the sum ``native`` is gloo's, which the first such sum opens.

    ``timeout_s`` limits the time without a byte; a dead link ends a call earlier, after ``SocketOptions.dead_s``.
    """

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        peers: Sequence[Peer],
        options: SocketOptions,
        open_gloo: Callable[[], Any],
        notes: FailureNotes,
        **more: Any,
    ) -> None:
        """``options.codes``: long messages to ranks of other hosts are coded, which takes compiled kernels."""
        super().__init__(open_gloo, notes, **more)
        here = peers[self.rank].address
        self._connections = {
            peer: _Connection(peer, at := peers[peer].address, sock, options.codes and at != here, options.dead_s)
            for peer, sock in sockets.items()
        }
        self._num_here = sum(peer.shares_cores(peers[self.rank]) for peer in peers)
        self._num_cores = len(os.sched_getaffinity(0))
        self._spin_s = _SPIN_S if self._num_here <= self._num_cores else 0.0
        self._num_sleeps = 0  # calls that do not poll
        self._in_use = threading.Lock()

    def all_reduce(self, x: Tensor) -> Tensor:
        if callable(self._group):
            self._connect(self._group)
        return super().all_reduce(x)

    def _connect(self, open_gloo: Callable[[], Any]) -> None:
        """Gloo connects at the first sum, because its ports may be blocked. Which rank is missing is told by barriers."""
        for _ in range(2):  # the second one fails if a rank was lost in the first
            self.barrier()
        try:
            gloo = open_gloo()
        except RuntimeError as error:
            self._failure = self.numbered(errors.CommError(f"gloo could not connect: {error}"))
            self.close()
            raise self._failure from None
        self.barrier()
        if self._group is not None:  # not closed meanwhile
            self._group = gloo

    def close(self) -> None:
        super().close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # broken, or closed before
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the sockets unless another thread uses them; its call fails now, and it closes them."""
        if self._in_use.acquire(blocking=False):
            for connection in self._connections.values():
                connection.sock.close()
            self._in_use.release()

    def _transfer(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        call, connections = self.call_tag(), self._connections
        with self._in_use:
            self._open_group()
            coded = dict[tuple[int, int], Tensor | None]()  # by place and size, of what goes to several ranks
            messages = [connections[peer].outgoing(call, buf, coded) for peer, buf in sends if buf.numel()]
            messages += [connections[peer].incoming(call, buf) for peer, buf in receives if buf.numel()]
            self._move(messages)
        if self._group is None:  # closed by another thread meanwhile, which left the sockets to this one
            self._close_sockets()

    def _move(self, messages: list["_Message"]) -> None:
        began = moved_at = time.perf_counter()
        self._num_sleeps -= 1
        spins = self._num_sleeps < 0 and all(message.payload_bytes < _SPIN_BYTES for message in messages)
        spin_s = self._spin_s if spins else 0.0
        while messages:
            num_moved = 0
            for message in messages:
                num_moved += message.move()
            now = time.perf_counter()
            if num_moved:
                messages = [message for message in messages if message.left]
                moved_at = now
            elif now - began > spin_s:
                self._sleep(messages, moved_at + self.timeout_s)
            elif now - began > _OFFER_S and len(os.sched_getaffinity(0)) * self._num_here > self._num_cores:
                os.sched_yield()
                if time.perf_counter() - now > _OFFER_S:
                    spin_s, self._num_sleeps = 0.0, _NUM_SLEEPS

    def _sleep(self, messages: list["_Message"], deadline: float) -> None:
        """Return when a message can move, or after a second; raise if the deadline has passed or a link is dead."""
        poll, events = select.poll(), dict[int, int]()
        for message in messages:
            fd = (sock := message.connection.sock).fileno()
            if message.event == select.POLLIN:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(message.left, _WAKE_BYTES))
            events[fd] = events.get(fd, 0) | message.event
            poll.register(fd, events[fd])
        left_s = deadline - time.perf_counter()
        if poll.poll(1000 * max(0.0, min(_SLEEP_S, left_s))):
            return
        for message in messages:
            message.connection.check_alive()
        if left_s <= 0:
            awaited = {message.connection.peer for message in messages}
            raise TransferError(f"timed out after {self.timeout_s:g} s without a byte", awaited, timed_out=True)


class _Connection:
    """The connection to one rank, and how many messages went each way."""

    def __init__(self, peer: int, address: str, sock: socket.socket, codes: bool, dead_s: float) -> None:
        self.peer, self.address, self.sock, self._codes, self._dead_s = peer, address, sock, codes, dead_s
        self._num_sent = self._num_received = 0
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The other host's kernel answers probes of an idle connection, also when its process is stopped.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, min(60, int(dead_s) // 6)))

    def outgoing(self, call: int, buf: Tensor, coded: dict[tuple[int, int], Tensor | None]) -> "_Message":
        self._num_sent += 1
        sent, at = buf, (buf.data_ptr(), buf.numel())
        if self._is_coded(buf):
            coded[at] = coded[at] if at in coded else wire_codec.encode(buf)
            sent = buf if (short := coded[at]) is None else short
        header = _HEADER.pack(self._num_sent & _MAX_NUMBER, call, buf.numel(), sent.numel())
        return _Message(self, select.POLLOUT, memoryview(header), sent, header)

    def incoming(self, call: int, buf: Tensor) -> "_Message":
        self._num_received += 1
        expected = _HEADER.pack(self._num_received & _MAX_NUMBER, call, buf.numel(), buf.numel())
        kind = _CodedMessage if self._is_coded(buf) else _Message
        return kind(self, select.POLLIN, memoryview(bytearray(HEADER_BYTES)), buf, expected)

    def _is_coded(self, buf: Tensor) -> bool:
        """Whether both ends know that the message may be coded."""
        return self._codes and buf.numel() >= wire_codec.LEAST_BYTES

    def check_alive(self) -> None:
        """Raise TransferError if nothing has arrived for ``dead_s``, not even an acknowledgement."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + 4)
        silent_s = struct.unpack_from("I", info, _LAST_ACK_AT)[0] / 1000
        if silent_s > self._dead_s:
            raise self.lost(f"no acknowledgement for {silent_s:.0f} s")

    def mismatch(self, header: bytes, expected: bytes) -> TransferError:
        (number, _, size, _), (own_number, _, own_size, _) = _HEADER.unpack(header), _HEADER.unpack(expected)
        cause = f"rank {self.peer} sent message {number} of {size} bytes, expected was {own_number} of {own_size} bytes"
        return TransferError(f"{cause}, or another collective's", [self.peer], timed_out=True)

    def lost(self, cause: str) -> TransferError:
        return TransferError(f"connection to rank {self.peer} at {self.address}: {cause}", [self.peer])


class _Message:
    """One message on its way: the parts of its header and payload that have not moved, and the ``select.poll`` event to wait for."""

    __slots__ = ("_expected", "_header", "connection", "event", "left", "parts", "payload_bytes")

    def __init__(
        self, connection: _Connection, event: int, header: memoryview, buf: Tensor, expected_header: bytes
    ) -> None:
        self.connection, self.event = connection, event
        self._header, self._expected = header, expected_header
        self.parts = [header, buf.numpy().data]
        self.payload_bytes = buf.numel()
        self.left = HEADER_BYTES + self.payload_bytes

    def move(self) -> int:
        """Send or receive as many bytes as the kernel takes or has now; return their number."""
        connection = self.connection
        try:
            if self.event == select.POLLOUT:
                num_bytes = connection.sock.sendmsg(self.parts)
            elif not (num_bytes := connection.sock.recvmsg_into(self.parts)[0]):
                raise connection.lost("closed by that rank")
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection.lost(error.strerror or str(error)) from None
        self.left -= num_bytes
        if self.left:
            self._drop(num_bytes)
        if self.left <= self.payload_bytes:
            self._check()
        return num_bytes

    def _check(self) -> None:
        """Called with a whole header, more than once."""
        if self._header != self._expected:
            raise self.connection.mismatch(bytes(self._header), self._expected)

    def _drop(self, num_bytes: int) -> None:
        """Remove the first ``num_bytes`` from the parts."""
        while num_bytes >= len(self.parts[0]):
            num_bytes -= len(self.parts.pop(0))
        if num_bytes:
            self.parts[0] = self.parts[0][num_bytes:]


class _CodedMessage(_Message):
    """A message that may arrive coded. Its header, which says how many bytes follow, is received alone."""

    __slots__ = ("_arriving", "_buf")

    def __init__(
        self, connection: _Connection, event: int, header: memoryview, buf: Tensor, expected_header: bytes
    ) -> None:
        super().__init__(connection, event, header, buf, expected_header)
        self._buf, self._arriving = buf, None
        self.parts, self.left = [header], HEADER_BYTES

    def _check(self) -> None:
        if self._arriving is None:
            if self.left:
                return
            *own, num_bytes = _HEADER.unpack(self._header)
            if own != list(_HEADER.unpack(self._expected)[:3]):
                raise self.connection.mismatch(bytes(self._header), self._expected)
            if not 0 < num_bytes <= self._buf.numel():
                raise self.connection.lost(f"a coded message of {num_bytes} bytes, which were {self._buf.numel()}")
            is_coded = num_bytes < self._buf.numel()
            self._arriving = torch.empty(num_bytes, dtype=torch.uint8) if is_coded else self._buf
            self.parts, self.left = [self._arriving.numpy().data], num_bytes
        elif not self.left and self._arriving is not self._buf and not wire_codec.decode(self._arriving, self._buf):
            raise self.connection.lost("a coded message arrived damaged")
