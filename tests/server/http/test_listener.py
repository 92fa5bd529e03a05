"""Binding the address, and the errors when that fails."""

import os
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.server import fake_engine
from helpers.server.fake_engine import FakeEngine, app_for

from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.app import run_server
from tightwire.server.http.listener import check_files, open_listener, remove_socket, url_of

TLS = Path(fake_engine.__file__).parent / "tls"


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ 'grüße' }}", encoding="utf-8")
    (tmp_path / "serve.yaml").write_text("chat_template: grüße", encoding="utf-8")
    program = """
import pathlib, sys
from tightwire.option_flags import read_yaml
from tightwire.server.config.flags import fields_of
from tightwire.server.http.listener import read_template
template, config = map(pathlib.Path, sys.argv[1:])
print(ascii([read_template(str(template)), read_yaml(config, fields_of(["http"]))]))
"""
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in ("chat.jinja", "serve.yaml"))]
    told = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=True).stdout
    assert told.strip() == ascii(["{{ 'grüße' }}", {"chat_template": "grüße"}])


def test_a_free_port_is_bound_and_named() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, HttpOptions()) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_small_writes_are_sent_at_once() -> None:
    with (
        open_listener(HttpOptions(port=0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_as_many_connections_as_the_hard_limit_allows() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
    try:
        open_listener(HttpOptions(port=0)).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_port_in_use_is_an_error() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127.0.0.1:{port} is in use by another program; choose another"):
            open_listener(HttpOptions(port=port))


def test_a_port_is_free_again_at_once() -> None:
    with open_listener(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            listener.accept()[0].close()
    open_listener(HttpOptions(port=port)).close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on --host {host} --port 0"):
        open_listener(HttpOptions(host=host, port=0))


def test_a_unix_socket(tmp_path: Path) -> None:
    options = HttpOptions(uds=str(tmp_path / "api.sock"))
    with open_listener(options) as listener, socket.socket(socket.AF_UNIX) as client:
        assert url_of(listener, options) == "http://localhost"
        client.connect(str(tmp_path / "api.sock"))
        with pytest.raises(ValueError, match=r"--uds .*api.sock is in use by another program"):
            open_listener(options)
    # The file of a server that was killed.
    with open_listener(options):
        remove_socket(options)
    assert not (tmp_path / "api.sock").exists()


def test_paths_where_no_socket_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="is in use by another program, or is not a socket"):
        open_listener(HttpOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(ValueError, match="cannot listen on --uds .*: No such file or directory"):
        open_listener(HttpOptions(uds=str(tmp_path / "nowhere" / "a.sock")))
    with pytest.raises(ValueError, match="cannot listen on --uds .*: AF_UNIX path too long"):
        open_listener(HttpOptions(uds=str(tmp_path / ("a" * 200))))


@pytest.mark.parametrize("is_unix", [False, True])
async def test_https(is_unix: bool, tmp_path: Path) -> None:
    uds = str(tmp_path / "api.sock") if is_unix else None
    options = HttpOptions(uds=uds, port=0, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"))
    check_files(options)
    verify = ssl.create_default_context(cafile=TLS / "cert.pem")
    with open_listener(options) as listener:
        url = url_of(listener, options)
        assert url.startswith("https://")
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=verify)
        async with (
            run_server(app_for(FakeEngine()), listener, options),
            httpx.AsyncClient(transport=transport) as client,
        ):
            answer = await client.post(f"{url}/v1/completions", json={"prompt": "a"})
            assert answer.json()["choices"][0]["text"] == "Hello, world."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"ssl_certfile": "nowhere", "ssl_keyfile": "key.pem"},
            "--ssl-certfile .*nowhere cannot be read: No such file",
        ),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "nowhere"},
            "--ssl-keyfile .*nowhere cannot be read: No such file",
        ),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "encrypted.pem"},
            "encrypted.pem is encrypted; give a key without",
        ),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "cert.pem"}, "are not a certificate and its key in PEM format"),
        ({"ssl_certfile": "key.pem", "ssl_keyfile": "key.pem"}, "are not a certificate and its key in PEM format"),
        ({"api_key_file": "nowhere"}, "--api-key-file .*nowhere cannot be read"),
        ({"request_log": "."}, "--request-log .* cannot be written: Is a directory"),
        ({"request_log": "nowhere/log"}, "--request-log .*nowhere/log cannot be written: No such file"),
    ],
    ids=str,
)
def test_wrong_files_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_files(HttpOptions(**{name: str(TLS / value) for name, value in options.items()}))  # pyright: ignore[reportArgumentType]
