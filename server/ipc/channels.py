"""Creates the zmq sockets between the processes of one server: each process binds one inbox, the others connect to it.

Addresses are abstract Unix sockets; between network namespaces, files in a private folder that its creator removes. A rank on
another host than rank 0 receives its plans over TCP.
"""

import os
import secrets
from pathlib import Path
from typing import Any, TypeVar

import zmq

Context = zmq.Context[zmq.Socket[bytes]]


def make_address(name: str, folder: Path | None = None) -> str:
    """A unique address, with ``name`` in it: an abstract socket, or a file in ``folder``."""
    return f"ipc://@tightwire-{secrets.token_hex(8)}-{name}" if folder is None else f"ipc://{folder / name}"


def connect_sender(context: Context, address: str) -> zmq.Socket[bytes]:
    """A socket whose messages wait for the receiver to bind; sending never blocks."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket


_AnySocket = TypeVar("_AnySocket", bound=zmq.Socket[Any])


def bind_receiver(context: zmq.Context[_AnySocket], address: str) -> _AnySocket:
    """An inbox that accepts only this user's processes: abstract sockets have no file permissions."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.setsockopt(zmq.IPV6, 1)
    socket.bind(address)
    return socket
