"""A link by name, such as ``1gbit``, ``pcie3x4`` or ``200mbit,latency=50us``, and the measurement of a link's rate."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Bytes per second of one lane in one direction, without line coding (8b/10b, then 128b/130b, then 242/256 in flits).
_PCIE_LANE = {1: 250e6, 2: 500e6, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130, 6: 7.5625e9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z/]+)")
_PCIE = re.compile(r"pcie([1-6])x(1|2|4|8|16)")
# Beyond these limits the first AllReduce exceeds the deadlines of its callers.
_LEAST_RATE, _MOST_LATENCY_S = 64e3 / 8, 1.0
_EXAMPLES = "200mbit, 2.5gbit, 300MB/s or pcie3x4, or with a latency: 200mbit,latency=50us"


ETHERNET_PAYLOAD = 0.945  # share of an Ethernet's rate that is left beside headers, preambles and gaps


@dataclass(frozen=True, slots=True)
class Link:
    """The rate at which each node can send and receive at the same time, and the latency."""

    name: str
    bytes_per_s: float | None  # unlimited if None
    latency_s: float = 0.0  # one way

    def seconds(self, num_bytes: float) -> float:
        """The time of one message alone on the link."""
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def parse_link(text: str) -> Link:
    """Parse a rate, a latency, or both with a comma between, in any order and case.

    Rates: ``kbit mbit gbit`` (a second), ``KB/s MB/s GB/s`` (of 10**3, 10**6, 10**9) and ``pcie`` generation ``x``
    lanes, which is one direction's payload before packet headers. Latency: ``latency=`` with ``us``, ``ms`` or ``s``.
    Raises ValueError for anything else, a part given twice, a rate below 64kbit, or a latency above a second.
    """
    rate: float | None = None
    latency_s: float | None = None
    for part in text.lower().replace(" ", "").split(","):
        if part.startswith("latency=") and latency_s is None:
            latency_s = _quantity(part.removeprefix("latency="), _SECONDS)
            known = latency_s is not None
        else:
            known = rate is None and (rate := _rate(part)) is not None
        if not known:
            raise ValueError(f"{text!r} is not a link; write {_EXAMPLES}")
    if (rate is not None and rate < _LEAST_RATE) or (latency_s or 0.0) > _MOST_LATENCY_S:
        raise ValueError(f"{text!r} is too slow to sum over: a link's rate is 64kbit or more, its latency 1s or less")
    return Link(text.lower().replace(" ", ""), rate, latency_s or 0.0)


def _rate(part: str) -> float | None:
    if lanes := _PCIE.fullmatch(part):
        return _PCIE_LANE[int(lanes[1])] * int(lanes[2])
    bits = _quantity(part, _BITS)
    rate = bits / 8 if bits is not None else _quantity(part, _BYTES)
    return rate or None


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = _NUMBER.fullmatch(text)
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


_PIECE_WAKES = 64  # of a sent piece: 1 MiB, and on a slow link less than a second's data, as a piece has a deadline
_WAKE_BYTES, _WAKE_S = 16 << 10, 10e-3  # the least data that wakes a receiver: waking uses cores that packets need
_WARM_UP_S = 0.3  # for the congestion window to open and the token bucket's initial credit to be used up
_DEADLINE_S = 30.0  # limit of a single send or receive


def line_rate(
    listener: socket.socket, caller: socket.socket, address: str, seconds: float, expected: float | None = None
) -> float:
    """Payload bytes per second of the slower direction while both directions are full, measured for ``seconds``.

    Args:
        listener, caller: unconnected TCP sockets of the two ends, closed afterwards.
        address: the listener's address.
        expected: the maximum of bytes per second, if known.
    Raises:
        OSError: nothing arrives for half a minute.
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
            return min(_both_ways(caller, accepted, time.monotonic(), seconds, bytes(_PIECE_WAKES * wake_bytes)))


def _both_ways(one: socket.socket, other: socket.socket, start: float, seconds: float, piece: bytes) -> list[float]:
    def send(end: socket.socket) -> None:
        while time.monotonic() < start + _WARM_UP_S + seconds:
            end.sendall(piece)
        end.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(4) as threads:
        senders = [threads.submit(send, end) for end in (one, other)]
        receivers = [threads.submit(_arrivals, end, start + _WARM_UP_S) for end in (one, other)]
    for sender in senders:
        sender.result()
    return [receiver.result() for receiver in receivers]


def _arrivals(end: socket.socket, start: float) -> float:
    """Bytes per second between the first arrival after ``start`` and the last."""
    piece = bytearray(_PIECE_WAKES * _WAKE_BYTES)
    count, first, last = 0, None, start
    while num_bytes := end.recv_into(piece):
        last = time.monotonic()
        if first is not None:
            count += num_bytes
        elif last >= start:
            first = last
    if first is None or last <= first:
        raise ConnectionError("no data arrived on the link for long enough to measure its rate")
    return count / (last - first)
