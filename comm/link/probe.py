"""Measures round trip, jitter and rate between two hosts, over a TCP connection of its own.

One host answers on a listening socket; the other sends messages of a 4-byte length and as many bytes, and gets a byte for each.
"""

import contextlib
import socket
import struct
import threading
import time

import msgspec

_LENGTH = struct.Struct("<I")
_ROUND_TRIPS, _SMALL_BYTES = 41, 64
_FIRST_BYTES, _MOST_BYTES, _RATE_S = 16 << 10, 16 << 20, 0.1  # messages double until one takes this long
_TIMEOUT_S = 10.0  # limit of each message


class PairFacts(msgspec.Struct, frozen=True):
    """The network between two nodes; its jitter is the 90th percentile of round trips less their median."""

    nodes: tuple[int, int]
    round_trip_s: float
    jitter_s: float
    bytes_per_s: float  # payload, one way

    def __str__(self) -> str:
        first, second = self.nodes
        return (
            f"node {first} to node {second}: round trip {1e6 * self.round_trip_s:.0f} us, jitter {1e6 * self.jitter_s:.0f} us, "
            f"{self.bytes_per_s * 8 / 1e6:.0f} Mbit/s"
        )


def answer_probes(listener: socket.socket) -> None:
    """Answer every connection to ``listener`` in threads, until it is shut down."""
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()


def measure_pair(nodes: tuple[int, int], address: str, port: int) -> PairFacts:
    """Measure the network to a host that answers there. OSError: it does not. Cost: 0.2 to 0.4 s, longer below 1 Mbit/s."""
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = sorted(_exchange(sock, _SMALL_BYTES) for _ in range(_ROUND_TRIPS))
        round_trip_s = trips[_ROUND_TRIPS // 2]
        num_bytes = _FIRST_BYTES
        while (taken_s := _exchange(sock, num_bytes)) < _RATE_S and num_bytes < _MOST_BYTES:
            num_bytes *= 2
    return PairFacts(
        nodes=nodes,
        round_trip_s=round_trip_s,
        jitter_s=trips[_ROUND_TRIPS * 9 // 10] - round_trip_s,
        bytes_per_s=num_bytes / max(taken_s - round_trip_s, 1e-6),
    )


def _exchange(sock: socket.socket, num_bytes: int) -> float:
    """Send a message, wait for its answer; return the seconds."""
    message = _LENGTH.pack(num_bytes) + bytes(num_bytes)
    began = time.perf_counter()
    sock.sendall(message)
    if not sock.recv(1):
        raise ConnectionResetError("the host closed the connection")
    return time.perf_counter() - began


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was shut down
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def _answer(sock: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    with sock, contextlib.suppress(OSError):
        sock.settimeout(_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := sock.recv(_LENGTH.size, socket.MSG_WAITALL):
            if len(header) < _LENGTH.size or (left := _LENGTH.unpack(header)[0]) > _MOST_BYTES:
                return
            while left:
                received = sock.recv_into(buffer, min(left, len(buffer)))
                if not received:
                    return
                left -= received
            sock.sendall(b"!")
