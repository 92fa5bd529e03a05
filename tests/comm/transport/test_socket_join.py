"""Connections between ranks: only ranks with the same secret join, and errors name the rank and its address."""

import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from harness import run_threads
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError
from tightwire.comm.transport import socket_join
from tightwire.comm.transport.socket_join import Peer, SocketOptions, connect_ranks, interface_address, read_secret
from tightwire.comm.transport.store_notes import FactExchange

SECRET = b"sixteen bytes ok"


def _facts(store: HashStore, rank: int, world_size: int = 2) -> FactExchange:
    return FactExchange(store, rank=rank, world_size=world_size, timeout_s=10.0)


def _join(
    store: HashStore, rank: int, world_size: int, secret: bytes = SECRET, address: str = "127.0.0.1"
) -> tuple[list[int], list[Peer]]:
    """Join, send this rank's number to each other rank, and return the numbers that arrive, by rank."""
    sockets, peers = connect_ranks(_facts(store, rank, world_size), address, SocketOptions(secret), 10.0)
    for sock in sockets.values():
        sock.settimeout(10.0)
        sock.sendall(bytes([rank]))
    told = [sockets[peer].recv(1)[0] for peer in sorted(sockets)]
    for sock in sockets.values():
        sock.close()
    return told, peers


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_every_pair_gets_a_connection(address: str) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"no socket on {address} here: {error}")
    store = HashStore()
    results = run_threads([partial(_join, store, rank, 4, address=address) for rank in range(4)])
    for rank, (told, peers) in enumerate(results):
        assert told == [peer for peer in range(4) if peer != rank]
        assert len({peer.machine for peer in peers}) == 1


def test_ranks_of_which_one_codes_messages_are_refused() -> None:
    store = HashStore()

    def join(rank: int) -> None:
        with pytest.raises(
            CommError, match="rank 1 and rank 0 have different --sum-dtype; give all hosts the same"
        ) as caught:
            connect_ranks(_facts(store, rank), "127.0.0.1", SocketOptions(SECRET, codes=rank == 1), 10.0)
        assert caught.value.ranks == (1,)

    run_threads([partial(join, rank) for rank in range(2)])


def test_another_secret_is_refused_on_both_sides() -> None:
    store, seen = HashStore(), dict[int, str]()

    def join(rank: int) -> None:
        with pytest.raises(CommError, match="different shared secrets.*--comm-secret-file") as caught:
            _join(store, rank, 2, SECRET + bytes([rank]))
        seen[rank] = str(caught.value)

    run_threads([partial(join, rank) for rank in range(2)])
    assert "rank 0 and rank 1 at 127.0.0.1" in seen[0] and "rank 1 and rank 0 at 127.0.0.1" in seen[1]


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64)])
def test_strangers_are_dropped(hello: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_join, "_STRANGER_S", 0.2)
    store = HashStore()

    def visit_then_join() -> tuple[list[int], list[Peer]]:
        store.wait(["sockets/0"])
        _, port, *_ = store.get("sockets/0").decode().split()
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            if hello:
                stranger.sendall(hello)
            return _join(store, 1, 2)

    (first, _), (second, _) = run_threads([partial(_join, store, 0, 2), visit_then_join])
    assert (first, second) == ([1], [0])


def test_a_rank_that_does_not_connect_is_named() -> None:
    store = HashStore()
    other = threading.Thread(target=_facts(store, 1).share, args=("sockets", b"10.9.8.7 1 there 0 token 0"))
    other.start()
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0 at 127.0.0.1 port \d+ .*rank 1 of 2 at 10.9.8.7"
    ) as caught:
        connect_ranks(_facts(store, 0), "127.0.0.1", SocketOptions(SECRET), 0.3)
    other.join()
    assert caught.value.ranks == (1,)


def test_a_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    other = threading.Thread(
        target=_facts(store, 0).share, args=("sockets", f"127.0.0.1 {port} here 0 token 0".encode())
    )
    other.start()
    with pytest.raises(
        CommError, match=f"rank 1 cannot connect to rank 0 at 127.0.0.1 port {port}: Connection refused"
    ):
        connect_ranks(_facts(store, 1), "127.0.0.1", SocketOptions(SECRET), 5.0)
    other.join()


def test_a_secret_is_a_file_of_16_bytes_or_more(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match=f"cannot be read from {file}: No such file"):
        read_secret(str(file))
    file.write_text("short\n")
    with pytest.raises(ValueError, match="has 5 bytes and needs at least 16; write one with `openssl rand"):
        read_secret(str(file))
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match="network interface nothing0 has no IPv4 address: No such device"):
        interface_address("nothing0")
