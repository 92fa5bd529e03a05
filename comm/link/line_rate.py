"""Measures the rate of a link: a bulk TCP transfer in both directions at once, timed at the receivers."""

import socket
import threading
import time

_PIECE_BYTES = 1 << 20
_WAKE_BYTES, _WAKE_S = 16 << 10, 10e-3  # the least data that wakes a receiver: waking uses cores that packets need
_WARM_UP_S = 0.3  # for the congestion window to open and the token bucket's initial credit to be used up
_DEADLINE_S = 30.0  # of a single send or receive


def line_rate(
    listener: socket.socket, caller: socket.socket, address: str, seconds: float, expected: float | None = None
) -> float:
    """Payload bytes per second of the slower direction while both directions are full.

    Args:
        listener, caller: unconnected TCP sockets of the two ends; closed afterwards.
        address: of the listener's end.
        seconds: how long to measure, after a warm-up of 0.3 s.
        expected: the maximum of bytes per second, if known.
    Raises:
        OSError: the two ends cannot reach each other, or nothing arrives for half a minute.
    """
    with listener, caller:
        for end in (listener, caller):
            end.settimeout(_DEADLINE_S)
        listener.bind((address, 0))
        listener.listen(1)
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(_DEADLINE_S)
            wake_bytes = _WAKE_BYTES if expected is None else max(1, min(_WAKE_BYTES, int(expected * _WAKE_S)))
            for end in (caller, accepted):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            return min(_both_ways(caller, accepted, time.monotonic(), seconds))


def _both_ways(one: socket.socket, other: socket.socket, start: float, seconds: float) -> list[float]:
    rates: list[float] = []
    errors: list[Exception] = []

    def send(end: socket.socket) -> None:
        piece = bytes(_PIECE_BYTES)
        try:
            while time.monotonic() < start + _WARM_UP_S + seconds:
                end.sendall(piece)
            end.shutdown(socket.SHUT_WR)
        except OSError as error:
            errors.append(error)

    def receive(end: socket.socket) -> None:
        try:
            rates.append(_arrivals(end, start + _WARM_UP_S))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(end,)) for body in (send, receive) for end in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return rates


def _arrivals(end: socket.socket, start: float) -> float:
    """Bytes per second between the first arrival after ``start`` and the last."""
    piece = bytearray(_PIECE_BYTES)
    count, first, last = 0, None, start
    while num_bytes := end.recv_into(piece):
        last = time.monotonic()
        if first is not None:
            count += num_bytes
        elif last >= start:
            first = last
    if first is None or last <= first:
        raise ConnectionError("the wire carried nothing long enough to be timed")
    return count / (last - first)
