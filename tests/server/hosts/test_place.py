"""This host's place among several: its address, the forms of the master's address, and its ports."""

import socket
from pathlib import Path

import pytest

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import network_facts
from tightwire.server.config.hosts import HostOptions, split_address
from tightwire.server.hosts import place
from tightwire.server.hosts.place import (
    NotNowError,
    UnknownNameError,
    find_place,
    keep_probe,
    last_probe,
    listen,
    wait_for_place,
)


def options(master: str = "127.0.0.1", node: int = 1, interface: str | None = None) -> HostOptions:
    return HostOptions(nnodes=2, node_rank=node, master_addr=master, interface=interface, port_range="29701-29707")


def test_the_route_to_the_master_gives_address_and_interface() -> None:
    place = find_place(options("127.0.0.1:7000"))
    assert (place.address, place.interface, place.port) == ("127.0.0.1", "lo", 7000)
    assert place.describe() == "node 1 of 2: address 127.0.0.1 (lo), node 0 at 127.0.0.1:7000, ports 29701 to 29707"


def test_each_rank_has_a_port_for_sums_and_off_node_0_one_for_steps() -> None:
    assert find_place(options(node=0)).listens(range(1)) == [29701, 29703]
    place = find_place(options())
    assert place.listens(range(1, 3)) == [29704, 29706, 29705, 29707]
    assert place.inbox(1) == "tcp://127.0.0.1:29704"
    assert place.inbox(1, "fd09::2") == "tcp://[fd09::2]:29704"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h", ("h", 29600)),
        ("10.0.0.1:5", ("10.0.0.1", 5)),
        ("[fd09::1]:5", ("fd09::1", 5)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", 29600)),
        ("fd09::1", ("fd09::1", 29600)),
    ],
)
def test_forms_of_the_masters_address(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["h:0", "h:70000", "h:port", "[::1", ":5"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--master-addr must be HOST"):
        HostOptions(master_addr=text)


def test_a_name_that_is_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.socket, "getaddrinfo", lambda *_, **__: [(None, None, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(ValueError, match="--master-addr head is 127.0.1.1 on this host"):
        find_place(options("head"))


@pytest.mark.parametrize("master", ["0.0.0.0", "[::]:29600"])
def test_the_address_of_all_interfaces_is_no_address_of_node_0(master: str) -> None:
    with pytest.raises(ValueError, match="where other hosts cannot reach it; give node 0's address"):
        find_place(options(master, node=0))


def test_a_name_is_looked_up_until_it_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Kubernetes, whose DNS learns of a pod after its start."""
    look_up, answers, said = socket.getaddrinfo, [socket.gaierror(-2, "Name or service not known")] * 2, list[str]()

    def late(name: str, *rest: object, **named: object) -> object:
        if name == "leader" and answers:
            raise answers.pop()
        return look_up("127.0.0.1" if name == "leader" else name, *rest, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(place.socket, "getaddrinfo", late)
    monkeypatch.setattr(place, "_LOOK_UP_S", 0.01)
    with pytest.raises(ValueError, match="leader is 127.0.0.1 on this host"):
        wait_for_place(options("leader"), 60.0, said.append)
    assert (
        len(said) == 2 and "finds no address for it: Name or service not known; looking it up again for 60 s" in said[0]
    )
    answers.append(socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(UnknownNameError):
        wait_for_place(options("leader"), 0.0, said.append)
    assert len(said) == 2


def test_an_unknown_interface_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--interface wlan9 has no address .*choose .*lo"):
        find_place(options(interface="wlan9"))


def test_of_an_interfaces_addresses_the_link_local_one_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel lists it first, and nobody can listen on it without the interface's name."""
    table = tmp_path / "if_inet6"
    table.write_text(f"fe80{'0' * 27}5 04 40 20 80 wire9\nfd09{'0' * 27}2 04 40 00 80 wire9\n")
    monkeypatch.setattr(place, "Path", lambda _: table)
    assert find_place(options("fd09::1", interface="wire9")).address == "fd09::2"


def test_an_interface_or_address_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--interface lo is this host's loopback, where other hosts cannot reach"):
        find_place(options("192.0.2.1", interface="lo"))
    with pytest.raises(
        ValueError, match="--master-addr fe80::1 is a link-local address, which names no interface; give"
    ):
        find_place(options("fe80::1"))
    monkeypatch.setattr(place.socket.socket, "connect", lambda *_: (_ for _ in ()).throw(OSError(101, "no network")))
    with pytest.raises(NotNowError, match="--master-addr 192.0.2.1: this host has no route to it: no network"):
        find_place(options("192.0.2.1"))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            NotNowError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose a free"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match="192.0.2.1:1: Cannot assign requested address") as caught:
        listen("192.0.2.1", 1)
    assert not isinstance(caught.value, NotNowError), "a wrong option"


def test_the_last_probe_is_kept_for_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="--network: no probe in .*network.json"):
        last_probe()
    link = network_facts([PairFacts((0, 1), 1e-4, 1e-5, 25e6)])
    keep_probe(link)
    assert last_probe() == link
    assert str(link.pairs[0]) == "node 0 to node 1: round trip 100 us, jitter 10 us, 200 Mbit/s"
