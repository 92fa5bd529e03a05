"""Creates the zmq sockets between the processes of one server: each process binds one inbox, the others connect to it.

Addresses are abstract Unix sockets; between network namespaces, files in a private folder that its creator removes. A rank on
another host than rank 0 receives its plans over TCP.
"""

import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq
import zmq.utils.z85

Context = zmq.Context[zmq.Socket[bytes]]


def make_address(name: str, folder: Path | None = None) -> str:
    """A unique address, with ``name`` in it: an abstract socket, or a file in ``folder``."""
    return f"ipc://@tightwire-{secrets.token_hex(8)}-{name}" if folder is None else f"ipc://{folder / name}"


def _receiver_key(secret: bytes) -> bytes:
    """The secret key of CURVE (Curve25519) of every receiver; its public key is known only to those who know the secret."""
    return zmq.utils.z85.encode(hmac.digest(secret, b"tightwire plans", "sha256"))


class Inboxes(NamedTuple):
    """The addresses of all ranks' inboxes, and the secret that hosts share; empty: none."""

    addresses: Sequence[str]
    secret: bytes = b""


def connect_sender(context: Context, address: str, secret: bytes = b"") -> zmq.Socket[bytes]:
    """A socket whose messages wait for the receiver to bind; sending never blocks.

    ``secret``: encrypts messages to another host, which must know it; empty: they are not encrypted.
    """
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    if secret and address.startswith("tcp:"):
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(_receiver_key(secret))
    socket.connect(address)
    return socket


_AnySocket = TypeVar("_AnySocket", bound=zmq.Socket[Any])


def bind_receiver(context: zmq.Context[_AnySocket], address: str, secret: bytes = b"") -> _AnySocket:
    """An inbox that accepts only this user's processes, because abstract sockets have no file permissions.

    On an address of the network it accepts only senders that know ``secret``; empty: all.
    """
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.setsockopt(zmq.IPV6, 1)
    if secret and address.startswith("tcp:"):
        socket.curve_server = True
        socket.curve_secretkey = _receiver_key(secret)
    socket.bind(address)
    return socket
