"""The wire of a server: which kind is made, what is said of it, and when it is refused."""

import contextlib

import pytest

from tightwire.comm.link import wire as wire_module
from tightwire.comm.link.emulated_network import NoEmulatedNetworkError
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.link.wire import LinkFacts, open_wire, plan_link, refuse_too_fast


def _facts(measured: float | None, asked: float | None = 25e6, **more: object) -> LinkFacts:
    values: dict[str, object] = {"name": "200mbit", "latency_s": 0.0, "emulation": "namespaces"} | more
    return LinkFacts(asked_bytes_per_s=asked, measured_bytes_per_s=measured, **values)  # type: ignore[arg-type]


def _refuse(*_: object, **__: object) -> None:
    raise NoEmulatedNetworkError("`ip` failed")


def test_where_a_network_cannot_be_made_auto_throttles_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "why_impossible", lambda: "")
    monkeypatch.setattr(wire_module, "EmulatedNetwork", _refuse)
    with open_wire(parse_link("200mbit,latency=1ms"), num_nodes=2, ranks_per_node=2) as wire:
        assert (wire.facts.emulation, wire.facts.reason) == ("user-space", "`ip` failed")
        assert wire.nodes == () and wire.folder is None
        assert wire.throttle == Link("200mbit,latency=1ms", 12.5e6, 1e-3)  # two ranks share a node's wire
        said = wire.facts.describe(2)
    assert (
        said == "link 200mbit,latency=1ms between 2 nodes: 25.0 MB/s requested, throttled in user space (`ip` failed)"
    )


@pytest.mark.parametrize("reason", ["", "only root makes network namespaces"])
def test_namespaces_asked_for_by_name_are_had_or_refused(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(wire_module, "why_impossible", lambda: reason)
    monkeypatch.setattr(wire_module, "EmulatedNetwork", _refuse)
    with (
        pytest.raises(ValueError, match=f"network namespaces are unavailable: {reason or '`ip` failed'}"),
        open_wire(parse_link("1gbit"), num_nodes=2, emulation="namespaces"),
    ):
        pass


def test_what_would_be_made_is_known_without_making_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "why_impossible", lambda: "no root")
    assert (plan_link(parse_link("1gbit")).emulation, plan_link(parse_link("1gbit")).reason) == (
        "user-space",
        "no root",
    )
    assert plan_link(parse_link("1gbit"), "user-space").reason == ""
    monkeypatch.setattr(wire_module, "why_impossible", lambda: "")
    assert plan_link(parse_link("1gbit")).emulation == "namespaces"


def test_a_wire_that_carries_less_than_nine_tenths_is_refused() -> None:
    refuse_too_fast(_facts(22.6e6))
    refuse_too_fast(_facts(1e6, asked=None))
    with pytest.raises(ValueError, match=r"22\.4 MB/s measured of 25\.0 MB/s \(namespaces\); request at most 179mbit"):
        refuse_too_fast(_facts(22.4e6))
    with pytest.raises(ValueError, match=r"0\.1 MB/s measured of 0\.125 MB/s \(namespaces\); request at most 0\.8mbit"):
        refuse_too_fast(_facts(0.1e6, asked=0.125e6))


class _DeadNetwork(contextlib.nullcontext["_DeadNetwork"]):
    """A network over which nothing comes in time."""

    def __init__(self, link: Link, *, num_nodes: int) -> None:
        super().__init__(self)
        self.link = link

    def measure(self) -> float:
        raise TimeoutError("timed out")


def test_a_wire_that_cannot_be_measured_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "why_impossible", lambda: "")
    monkeypatch.setattr(wire_module, "EmulatedNetwork", _DeadNetwork)
    with (
        pytest.raises(ValueError, match="the rate of the link 64kbit cannot be measured: timed out; request a faster"),
        open_wire(parse_link("64kbit"), num_nodes=2),
    ):
        pass


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (_facts(24.6e6), "24.6 MB/s measured of 25.0 MB/s, tc tbf between network namespaces"),
        (
            _facts(24.6e6, latency_s=1e-4),
            "24.6 MB/s measured of 25.0 MB/s, tc tbf between network namespaces, latency in user space",
        ),
        (_facts(2e9, asked=None), "2000.0 MB/s measured, network namespaces"),
        (_facts(24e6, emulation="user-space"), "24.0 MB/s measured of 25.0 MB/s, throttled in user space"),
    ],
)
def test_a_line_says_rate_and_kind(facts: LinkFacts, words: str) -> None:
    assert facts.describe(2) == f"link 200mbit between 2 nodes: {words}"


def test_costs_go_by_the_measured_rate() -> None:
    assert _facts(24e6).link == Link("200mbit", 24e6)
    assert _facts(None).link == Link("200mbit", 25e6)
    assert _facts(2e9, asked=None).link == Link("200mbit", None)
