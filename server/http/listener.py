"""Binds the address before loading starts, and checks the files of the HTTP options, so that a wrong one fails at once."""

import contextlib
import errno
import os
import resource
import socket
import ssl
from pathlib import Path

from tightwire.server.config.http import HttpOptions, wants_traces
from tightwire.server.config.keys import read_keys


def check_files(options: HttpOptions) -> None:
    """Open every file that the options name. ValueError: the first that is wrong, or packages that are missing."""
    if options.ssl_certfile is not None and options.ssl_keyfile is not None:
        _check_certificate(options.ssl_certfile, options.ssl_keyfile)
    if options.api_key_file is not None:
        read_keys(options.api_key_file)
    if options.chat_template is not None:
        read_template(options.chat_template)
    if options.request_log is not None:
        try:
            open(options.request_log, "a").close()
        except OSError as error:
            raise ValueError(f"--request-log {options.request_log} cannot be written: {error.strerror}") from error
    wants_traces(options.otlp_endpoint, os.environ)


def read_template(path: str) -> str:
    """The text of ``--chat-template``. ValueError: it cannot be read."""
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: cannot be read: {error}") from None


def _check_certificate(certfile: str, keyfile: str) -> None:
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error

    def refuse() -> str:  # OpenSSL would ask for the password on the terminal
        raise ValueError(f"--ssl-keyfile {keyfile} is encrypted; give a key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse)
    except ssl.SSLError as error:
        reason = error.reason.replace("_", " ").lower() if error.reason else "not in PEM format"
        both = f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile}"
        raise ValueError(f"{both} are not a certificate and its key in PEM format ({reason})") from error


def open_listener(options: HttpOptions) -> socket.socket:
    """A listening socket. ValueError: the address is in use, not this machine's, or not permitted."""
    # Each connection is an open file; the usual soft limit of 1,024 is meant for programs that call select.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.uds is not None:
        return _unix_listener(options.uds)
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{where} is in use by another program; choose another --port, or --port 0") from error
        why = f"--host {options.host} --port {options.port}: {error.strerror or error}"
        raise ValueError(f"cannot listen on {why}") from error
    # Connections inherit it. asyncio sets it only on sockets with an explicit protocol number, unlike this one. Without it
    # a body that follows its headers, or a token that follows a token, waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def remove_socket(options: HttpOptions) -> None:
    if options.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(options.uds)


def _unix_listener(path: str) -> socket.socket:
    """A socket that a server left when it was killed is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"--uds {path} is in use by another program, or is not a socket; give another") from error
        raise ValueError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return listener


def _is_left_over(path: str) -> bool:
    """True for a socket that no program listens on."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return Path(path).is_socket() and client.connect_ex(path) == errno.ECONNREFUSED
    return False


def url_of(listener: socket.socket, options: HttpOptions) -> str:
    """The server's address; of a Unix socket, the one to give to a client together with the socket."""
    scheme = "http" if options.ssl_certfile is None else "https"
    if options.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
