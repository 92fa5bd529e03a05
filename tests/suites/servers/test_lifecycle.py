"""A server's life with real processes: no fault leaves a hanging client, a running process or a file."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.server import faulty_server
from helpers.server.server_process import START_S, ServerProcess, Streaming, complete, get, is_alive, wait_until
from tiny import make_tiny

from tightwire.server.ranks.reporter import HEARTBEAT_PERIOD_S

ENDLESS = 60_000  # tokens: minutes of work, so that what ends it is the test's doing

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=65_536)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers of the tiny model on two ranks; ends those that the test leaves."""
    servers: list[ServerProcess] = []

    def start_one(*arguments: str, fault: tuple[str, str] | None = None) -> ServerProcess:
        options = ("--tp", "2", "--port", "0", "--kv-cache-memory", "128MiB", *arguments)
        folder = tmp_path / f"server{len(servers)}"
        if fault is None:
            servers.append(ServerProcess(folder, str(model), *options))
        else:
            command = (sys.executable, faulty_server.__file__, *fault)
            servers.append(ServerProcess(folder, str(model), *options, command=command))
        return servers[-1]

    yield start_one
    for server in servers:
        with server:
            pass


def files_in_memory(pid: int) -> list[str]:
    """What a process holds open or mapped in shared memory or a temporary folder."""
    links = list[str]()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(fd))
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [text for text in links + mapped if "/dev/shm/" in text]


def assert_told(streaming: Streaming, reason: str) -> None:
    """The client got an error object with the reason, then the end mark."""
    events = streaming.finish(10)
    assert streaming.failure is None, streaming.failure
    assert events[-1] == "data: [DONE]"
    assert '"error"' in events[-2] and reason in events[-2]


def test_ready_means_that_a_request_is_answered_and_sigterm_lets_those_running_finish(start: Start) -> None:
    server = start()
    url = server.wait_ready()
    assert get(f"{url}/health").status_code == 200
    answer = complete(url, 7).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert "\ntightwire_startup_seconds " in get(f"{url}/metrics").text
    pids = [server.process.pid, *server.ranks()]
    assert len(pids) == 3
    assert [files_in_memory(pid) for pid in pids] == [[], [], []]
    streaming = Streaming(url, 400)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "shutting down" in server.log, 20)
    refused = complete(url, 1)
    assert [get(f"{url}/health/{probe}").status_code for probe in ("live", "ready")] == [200, 503]
    events = streaming.finish(60)
    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    assert events[-1] == "data: [DONE]" and any('"finish_reason":"length"' in event for event in events)
    assert server.wait_exit(30) == 0
    assert not any(map(is_alive, pids))
    assert list(server.temp.iterdir()) == []
    assert "2 heads, 1 KV heads" in server.log
    assert len(re.findall(r"rank [01]: .* of weights, at most \d+(\.\d)?MiB of host memory", server.log)) == 2


def test_a_trace_holds_both_ranks_collectives_and_what_outlasts_the_grace_time_is_cancelled(start: Start) -> None:
    server = start("--shutdown-grace-s", "0.5")
    url = server.wait_ready()
    streaming = Streaming(url, ENDLESS)
    page = httpx.get(f"{url}/comm/trace?seconds=0.5", timeout=120, trust_env=False).json()
    ended = [e for e in page["traceEvents"] if e["ph"] == "X" and "unfinished" not in e["args"]]
    bars = [{e["args"]["number"]: e for e in ended if e["pid"] == rank} for rank in (0, 1)]
    both = bars[0].keys() & bars[1].keys()
    assert len(both) > 5 and page["otherData"] == page["otherData"] | {"clocks": "one", "lost": {}}
    sites = {bar["args"]["site"] for bar in bars[0].values()}
    assert sites == {"embed", "o_proj 0", "down_proj 0", "o_proj 1", "down_proj 1", "logits"}
    for number in both:
        first, second = (bars[rank][number] for rank in (0, 1))
        assert first["name"] == second["name"]
        # Neither can end before the other has begun: ranks of one host are on one clock.
        assert first["ts"] <= second["ts"] + second["dur"] and second["ts"] <= first["ts"] + first["dur"]
    with ThreadPoolExecutor() as pool:
        recording = pool.submit(httpx.get, f"{url}/comm/trace?seconds=30", timeout=120, trust_env=False)
        time.sleep(0.5)
        assert server.end(signal.SIGHUP) == 0, "its terminal closed"
        refused = recording.result()
    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    assert streaming.finish(5)[-1] == "data: [DONE]"
    assert "cancelling 1 sequences" in server.log and "Traceback" not in server.log


def _a_second_signal_ends_at_once(server: ServerProcess, url: str) -> None:
    streaming, ranks = Streaming(url, ENDLESS), server.ranks()
    for _ in range(3):  # a terminal, a shell and make may all pass on the same Ctrl-C
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    wait_until(lambda: "shutting down" in server.log, 20)
    time.sleep(1)
    assert server.process.poll() is None
    assert server.end(signal.SIGINT, timeout_s=10) == 128 + signal.SIGINT
    assert not any(map(is_alive, ranks))
    streaming.finish(5)


@pytest.mark.alone
def test_a_killed_rank_is_named_to_every_client_and_another_server_goes_on(start: Start) -> None:
    """And ends at a second signal."""
    server, other = start(), start()
    url, other_url = server.wait_ready(), other.wait_ready()
    want = complete(other_url, 20).json()["choices"][0]["text"]
    assert complete(url, 20).json()["choices"][0]["text"] == want
    ranks = server.ranks()
    streaming = Streaming(url, ENDLESS)
    time.sleep(2 * HEARTBEAT_PERIOD_S)  # what ranks do is known as of their last heartbeat
    os.kill(ranks[1], signal.SIGKILL)
    killed_s = time.monotonic()
    reason = f"rank 1 (pid {ranks[1]}) was killed by SIGKILL"
    assert_told(streaming, reason)
    health = get(f"{url}/health")
    assert health.status_code == 503 and reason in health.json()["reason"]
    assert "rank 0: step" in health.json()["reason"]
    assert server.wait_exit(30) == 1
    assert time.monotonic() - killed_s < 8
    assert reason in server.log
    assert not any(map(is_alive, ranks))
    assert complete(other_url, 20).json()["choices"][0]["text"] == want
    _a_second_signal_ends_at_once(other, other_url)


@pytest.mark.alone
def test_a_second_signal_removes_the_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    server = start("--uds", str(path))
    wait_until(lambda: "ready in" in server.log, START_S)
    body = {"prompt": "hello", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client,
        client.stream("POST", "http://localhost/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()  # dropping it would close the connection
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert server.end(signal.SIGTERM, timeout_s=10) == 128 + signal.SIGTERM
    assert not path.exists()


@pytest.mark.alone
def test_a_stopped_rank_is_noticed_by_its_silence(start: Start) -> None:
    server = start("--rank-timeout-s", "2")
    url = server.wait_ready()
    ranks = server.ranks()
    streaming = Streaming(url, ENDLESS)
    time.sleep(2 * HEARTBEAT_PERIOD_S)
    os.kill(ranks[1], signal.SIGSTOP)
    assert_told(streaming, f"rank 1 (pid {ranks[1]}) is stopped (SIGSTOP)")
    reason = get(f"{url}/health").json()["reason"]
    collective = r"all_\w+ \S+ \d+ B, #\d+"
    # A follower is idle between two plans.
    assert re.search(rf"last seen at: (step \d+|idle)(:|, after) {collective}", reason), reason
    assert re.search(rf"\(rank 0: step \d+(:|, after) {collective}", reason), reason
    assert server.wait_exit(30) == 1
    assert not any(map(is_alive, ranks))
    assert list(server.temp.iterdir()) == []


@pytest.mark.alone
def test_a_hung_step_is_noticed_though_the_rank_lives(start: Start) -> None:
    server = start("--step-timeout-s", "2", fault=("hang", "1"))
    url = server.wait_ready()
    streaming = Streaming(url, ENDLESS)
    assert_told(streaming, "has been at one step for")
    assert server.wait_exit(30) == 1
    step = f"step {faulty_server.HANG_AT_STEP}"
    blamed, told = rf"rank 1 \(pid \d+\) has been at one step for \d+ s: {step}, after", r"\S+ \S+ \d+ B, #\d+"
    assert re.search(rf"{blamed} {told} \(rank 0: {step}: {told}, \d", server.log), server.log


def _a_killed_parent_leaves_no_process(server: ServerProcess) -> None:
    ranks = server.wait_ranks()
    wait_until(lambda: len(os.listdir(f"/proc/{ranks[0]}/task")) > 1, 20)  # until then it looks for its parent itself
    os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank must go too
    server.end(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), 20)
    assert list(server.temp.iterdir()) == []


def test_a_parent_that_is_killed_while_it_loads_leaves_no_process(start: Start) -> None:
    _a_killed_parent_leaves_no_process(start())


def test_a_failed_load_on_one_rank_ends_all_with_its_cause(start: Start) -> None:
    server = start(fault=("load", "1"))
    ranks = server.wait_ranks()
    assert server.wait_exit(START_S) == 1
    assert f"rank 1 (pid {ranks[1]}) failed while: weights: OSError: the disk is on fire" in server.log
    assert "Traceback" in server.log
    assert not any(map(is_alive, ranks))


def test_a_taken_port_is_refused_before_anything_is_started(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait_exit(START_S) == 2
    assert f"127.0.0.1:{port} is in use" in server.log and "--port 0" in server.log
    assert "import" not in server.log


def test_what_cannot_run_is_refused_before_it_is_loaded(start: Start) -> None:
    server = start("--kv-cache-memory", "900TiB")
    ranks = server.wait_ranks()
    assert server.wait_exit(START_S) == 2
    assert "the KV cache does not fit; --kv-cache-memory" in server.log and "host memory:" in server.log
    assert "weights  " not in server.log.partition("KV cache")[0]
    assert not any(map(is_alive, ranks))


def test_a_start_says_five_lines_and_a_command_to_paste_and_a_killed_parent_leaves_no_process(start: Start) -> None:
    server = start("--log-level", "info")
    url = server.wait_ready()
    wait_until(lambda: "  try  " in server.log, 10)
    ready = server.log[server.log.index("ready in") :].splitlines()
    assert ready[0].endswith(f" s at {url}")
    assert [line.split()[0] for line in ready[1:]] == ["model", "split", "AllReduce", "memory", "try"]
    assert "2 ranks on cpu" in ready[2] and "over shared-memory: 2 + 2 heads" in ready[2]
    assert "predicted" in ready[3] and " available in host memory; weights " in ready[4]
    answer = subprocess.run(ready[5].split(maxsplit=1)[1], shell=True, capture_output=True, timeout=60, check=True)
    assert b'"choices"' in answer.stdout
    assert all(line.startswith("[") for line in server.log.partition("ready in")[0].splitlines()), server.log
    Streaming(url, ENDLESS)
    _a_killed_parent_leaves_no_process(server)
