import os
import signal
import sys
import time

import pytest

from tightwire.bench.ttft.server import ServerChild, ServerDiedError, ServerRefusedError


def child(script: str) -> ServerChild:
    return ServerChild([], command=(sys.executable, "-c", f"import sys, time\nlog = sys.stderr.write\n{script}"))


def test_ready_line_gives_the_url_and_the_end_of_the_block_ends_it() -> None:
    with child("log('loading\\nready in 1.0 s at http://127.0.0.1:81: tiny\\n')\ntime.sleep(60)") as server:
        assert server.wait_ready(20) == "http://127.0.0.1:81"
        pid = server.pid
        assert os.getsid(pid) == pid, "a terminal's Ctrl-C is not for it"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_refusal_has_the_servers_own_message() -> None:
    script = "log('starting\\ntightwire serve: the link is faster than\\nthis machine\\n')\nsys.exit(2)"
    with child(script) as server, pytest.raises(ServerRefusedError, match="the link is faster than\nthis machine"):
        server.wait_ready(20)


def test_death_shows_the_end_of_the_log() -> None:
    death = pytest.raises(ServerDiedError, match=r"exit code 1; its log ends:\nrank 1 was killed")
    with child("log('rank 1 was killed\\n')\nsys.exit(1)") as server, death:
        server.wait_ready(20)
    # What says why comes before the ranks' tracebacks, and is not lost above them.
    script = "log('loading\\ntightwire serve: rank 0 failed\\n' + 'in a file\\n' * 50)\nsys.exit(1)"
    with child(script) as server, pytest.raises(ServerDiedError, match="ends:\ntightwire serve: rank 0 failed\nin a"):
        server.wait_ready(20)
    with child("log('ready in 1 s at http://127.0.0.1:81: tiny\\n')\ntime.sleep(60)") as server:
        server.wait_ready(20)
        server.check()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerDiedError, match="by signal SIGKILL"):
            for _ in range(200):
                server.check()
                time.sleep(0.02)


def test_a_server_that_never_is_ready_is_given_up() -> None:
    with child("log('still loading\\n')\ntime.sleep(60)") as server, pytest.raises(ServerDiedError, match="not ready"):
        server.wait_ready(0.5)
