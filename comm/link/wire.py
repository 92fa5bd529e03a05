"""The link between the nodes of a server: opens, measures, describes and removes it.

    with open_wire(parse_link("200mbit"), num_nodes=2) as wire:
        wire.nodes[1].enter()          # a process of the second node; () if nodes are not namespaces

With network namespaces the kernel limits the rate (``comm.link.emulated_network``). If that is not possible,
``wire.throttle`` is the link to which each rank's transport is slowed down (``comm.transport.emulated``), and the facts
say why. Imports nothing heavy: the parent of the ranks opens the link before it knows the model.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tightwire.comm.link.emulated_network import EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError, why_impossible
from tightwire.comm.link.link import Link
from tightwire.comm.link.probe import PairFacts

NAMESPACES, USER_SPACE = "namespaces", "user-space"
NETWORK = "network"  # not emulated: between hosts, as probed at start
EMULATIONS = ("auto", NAMESPACES, USER_SPACE)
LEAST_SHARE = 0.9  # share of the requested rate; a slower link is refused

_FULL_SHARE = 0.92  # nearly all of the rate that remains beside headers
_TRIES = 6
_MEASURE_S = 15.0  # no further try after this long: on a slow link each try takes seconds


class LinkTooFastError(ValueError):
    """This machine does not carry the requested rate; the message says how much it carries."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A link as requested and as measured. Rates are of a node, one way, in bytes of payload."""

    name: str
    asked_bytes_per_s: float | None  # None if only a latency was requested
    measured_bytes_per_s: float | None  # None until it is measured
    latency_s: float
    emulation: str
    reason: str = ""  # why namespaces are not used; empty if they are, or if user space was requested
    pairs: tuple[PairFacts, ...] = ()  # pairs of hosts

    @property
    def link(self) -> Link:
        """The link with its measured rate, or its requested rate if it was not measured."""
        if self.emulation == NETWORK:
            return Link(self.name, self.measured_bytes_per_s, self.latency_s)
        rate = self.asked_bytes_per_s and (self.measured_bytes_per_s or self.asked_bytes_per_s)
        return Link(self.name, rate, self.latency_s)

    @property
    def how(self) -> str:
        """The kind of emulation, in words."""
        if self.emulation == USER_SPACE:
            return "throttled in user space"
        how = "tc tbf between network namespaces" if self.asked_bytes_per_s else "network namespaces"
        return f"{how}, latency in user space" if self.latency_s else how

    def describe(self, num_nodes: int) -> str:
        """One line for the log."""
        if self.emulation == NETWORK:
            return f"network probed at start: {'; '.join(map(str, self.pairs))}"
        asked, measured = self.asked_bytes_per_s, self.measured_bytes_per_s
        if measured is None:
            rate = f"{_rate(asked)} requested" if asked else "no rate limit"
        else:
            rate = f"{_rate(measured)} measured" + (f" of {_rate(asked)}" if asked else "")
        why = f" ({self.reason})" if self.reason else ""
        return f"link {self.name} between {num_nodes} nodes: {rate}, {self.how}{why}"


def network_facts(pairs: Sequence[PairFacts]) -> LinkFacts:
    """The network between hosts, as slow as its slowest pair. The latency is half of the longest round trip."""
    return LinkFacts(
        name="between hosts",
        asked_bytes_per_s=None,
        measured_bytes_per_s=min(pair.bytes_per_s for pair in pairs),
        latency_s=max(pair.round_trip_s for pair in pairs) / 2,
        emulation=NETWORK,
        pairs=tuple(pairs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """An open link, with what the processes on both sides of it need."""

    facts: LinkFacts
    nodes: tuple[EmulatedNode, ...] = ()  # the namespaces of the nodes' processes; () on the machine's own network
    throttle: Link | None = None  # the link to which each rank's transport is slowed down
    folder: Path | None = None  # for sockets between processes of different nodes, removed with the link


@contextmanager
def open_wire(link: Link, *, num_nodes: int, ranks_per_node: int = 1, emulation: str = "auto") -> Iterator[Wire]:
    """Open the link until the end of the context; the emulation ``auto`` uses namespaces if possible.

    Call on the main thread before other threads run. Cost: about two seconds with namespaces. Raises ValueError, with
    nothing left behind, if namespaces were requested and are not possible, or the machine cannot carry the link.
    """
    facts, network = plan_link(link, emulation), None
    if facts.emulation == NAMESPACES:
        try:
            network = EmulatedNetwork(link, num_nodes=num_nodes)
        except NoEmulatedNetworkError as error:
            if emulation == NAMESPACES:
                raise ValueError(f"network namespaces are unavailable: {error}") from error
            facts = msgspec.structs.replace(facts, emulation=USER_SPACE, reason=str(error))
    if network is None:
        # Ranks of one node share its link. Traffic of the flat group inside a node is slowed too.
        rate = None if link.bytes_per_s is None else link.bytes_per_s / ranks_per_node
        yield Wire(facts=facts, throttle=Link(link.name, rate, link.latency_s))
        return
    with network:
        facts = msgspec.structs.replace(facts, measured_bytes_per_s=_measure(network))
        refuse_too_fast(facts)
        # The kernel limits the rate but often cannot delay (netem is missing), so a throttled transport adds the latency.
        delay = Link(link.name, None, link.latency_s) if link.latency_s else None
        yield Wire(facts=facts, nodes=network.nodes, throttle=delay, folder=network.folder)


def _measure(network: EmulatedNetwork) -> float:
    """The measured rate: the best of several tries if the first is too low, as other programs may have used the cores."""
    asked, most = network.link.bytes_per_s or 0.0, 0.0
    deadline = time.monotonic() + _MEASURE_S
    try:
        for _ in range(_TRIES):
            most = max(most, network.measure())
            if most >= _FULL_SHARE * asked or time.monotonic() > deadline:
                break
        return most
    except OSError as error:
        raise ValueError(
            f"the rate of the link {network.link.name} cannot be measured: {error}; request a faster link, or stop "
            "other programs on this machine"
        ) from error


def plan_link(link: Link, emulation: str = "auto") -> LinkFacts:
    """The facts of the link that ``open_wire`` would try first. Raises ValueError as it does."""
    reason = "" if emulation == USER_SPACE else why_impossible()
    if emulation == NAMESPACES and reason:
        raise ValueError(f"network namespaces are unavailable: {reason}")
    return LinkFacts(
        name=link.name,
        asked_bytes_per_s=link.bytes_per_s,
        measured_bytes_per_s=None,
        latency_s=link.latency_s,
        emulation=USER_SPACE if reason or emulation == USER_SPACE else NAMESPACES,
        reason=reason,
    )


def refuse_too_fast(facts: LinkFacts) -> None:
    """Raise LinkTooFastError if the measured rate is less than ``LEAST_SHARE`` of the requested rate."""
    asked, measured = facts.asked_bytes_per_s, facts.measured_bytes_per_s
    if asked is None or measured is None or measured >= LEAST_SHARE * asked:
        return
    most_mbit = measured * 8 / 1e6
    most = f"{int(most_mbit)}" if most_mbit >= 10 else f"{int(most_mbit * 100) / 100:g}"
    raise LinkTooFastError(
        f"this machine cannot carry the link {facts.name}: {_rate(measured)} measured of {_rate(asked)} "
        f"({facts.emulation}); request at most {most}mbit, or stop other programs on this machine"
    )


def _rate(bytes_per_s: float) -> str:
    megabytes = bytes_per_s / 1e6
    return f"{megabytes:.1f} MB/s" if megabytes >= 10 else f"{megabytes:.3g} MB/s"
