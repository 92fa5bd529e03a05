"""Binds the port before loading starts, so that a wrong address fails at once."""

import errno
import socket

from tightwire.server.config.serve import HttpOptions


class PortTakenError(OSError):
    """The server cannot listen on this address; the message says why and what to do."""


def open_listener(options: HttpOptions) -> socket.socket:
    """A listening socket. PortTakenError: the address is in use, not this machine's, or not permitted."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"{where} is in use by another program; choose another --port, or --port 0 for any free one"
            ) from error
        raise PortTakenError(f"cannot listen on {where}: {error.strerror or error}") from error
    # Connections inherit it. asyncio sets it only on sockets with an explicit protocol number, unlike this one. Without it
    # a body that follows its headers, or a token that follows a token, waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
