"""Binding the address, and the errors when that fails."""

import socket

import pytest

from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.listener import PortTakenError, open_listener, url_of


def test_a_free_port_is_bound_and_named() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_small_writes_are_sent_at_once() -> None:
    with (
        open_listener(HttpOptions(port=0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_an_error() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"127.0.0.1:{port} is in use by another program; choose another"):
            open_listener(HttpOptions(port=port))


def test_a_port_is_free_again_at_once() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            listener.accept()[0].close()
    open_listener(HttpOptions(port=port)).close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(PortTakenError, match=f"cannot listen on {host}:0"):
        open_listener(HttpOptions(host=host, port=0))
