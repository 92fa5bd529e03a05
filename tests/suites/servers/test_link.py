"""A server behind an emulated wire: what it says of it, and that no end of it leaves a namespace or a socket behind."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.server.server_process import START_S, ServerProcess, complete, get, is_alive, wait_until
from tiny import make_tiny

from tightwire.comm.link.emulated_network import EmulatedNetwork, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ModelOptions, ServeConfig

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server of the tiny model behind a link; ends it when the test leaves it."""
    servers: list[ServerProcess] = []

    def start_one(*arguments: str) -> ServerProcess:
        options = ("--port", "0", "--kv-cache-memory", "1MiB", *arguments)
        servers.append(ServerProcess(tmp_path / f"server{len(servers)}", str(model), *options))
        return servers[-1]

    yield start_one
    for server in servers:
        with server:
            pass


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        EmulatedNetwork(parse_link("1gbit")).close()
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")


def _left(server: ServerProcess) -> list[str]:
    """The folder of a server's network, and the processes that hold its namespaces, which have it as an argument."""
    name = f"/run/tightwire-{server.process.pid}-"
    holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if name in _command(pid)]
    return [*map(str, holders), *map(str, Path("/run").glob(f"{Path(name).name}*"))]


def _ranks(server: ServerProcess) -> list[int]:
    """Its children that are ranks: others hold the network's namespaces, and some that made it come and go."""
    return [pid for pid in server.ranks() if "tightwire.server.ranks.worker" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


@pytest.mark.alone
@pytest.mark.usefixtures("namespaces")
def test_ranks_on_two_nodes_answer_over_the_wire_and_ctrl_c_takes_it_away(start: Start) -> None:
    server = start("--tp", "4", "--nodes", "2", "--link", "40mbit,latency=100us", "--allreduce", "hierarchical")
    url = server.wait_ready()
    ranks = _ranks(server)
    networks = [os.stat(f"/proc/{pid}/ns/net").st_ino for pid in ranks]
    own = os.stat("/proc/self/ns/net").st_ino
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert own not in networks
    assert complete(url, 3).json()["usage"]["completion_tokens"] == 3
    link = get(f"{url}/comm").json()["link"]
    assert (link["name"], link["asked_bytes_per_s"], link["emulation"]) == ("40mbit,latency=100us", 5e6, "namespaces")
    assert 0.9 * 5e6 <= link["measured_bytes_per_s"] <= 1.1 * 5e6 and link["latency_s"] == pytest.approx(1e-4)
    assert "link 40mbit,latency=100us between 2 nodes: " in server.log
    assert "MB/s measured of 5 MB/s, tc tbf between network namespaces, latency in user space" in server.log
    assert server.end(signal.SIGINT) == 0
    assert not any(map(is_alive, ranks)) and _left(server) == []


@pytest.mark.usefixtures("namespaces")
def test_a_killed_rank_ends_the_server_and_its_network(start: Start) -> None:
    server = start("--tp", "2", "--link", "40mbit")
    wait_until(lambda: len(_ranks(server)) == 2, START_S)
    assert len(_left(server)) == 4  # holders of two nodes and of the bridge between them, a folder
    os.kill(_ranks(server)[1], signal.SIGKILL)
    assert server.wait_exit(START_S) == 1
    assert "was killed by SIGKILL" in server.log and _left(server) == []


@pytest.mark.alone
@pytest.mark.usefixtures("namespaces")
def test_a_killed_server_leaves_no_network_and_no_rank(start: Start) -> None:
    server = start("--tp", "2", "--link", "40mbit")
    wait_until(lambda: len(_ranks(server)) == 2, START_S)
    ranks = _ranks(server)
    server.process.kill()
    wait_until(lambda: _left(server) == [] and not any(map(is_alive, ranks)), 10)


@pytest.mark.usefixtures("namespaces")
def test_a_link_faster_than_the_machine_is_refused_with_the_rate_it_has(start: Start) -> None:
    server = start("--tp", "2", "--link", "pcie6x16")
    assert server.wait_exit(START_S) == 2
    assert "this machine cannot carry the link pcie6x16: " in server.log
    assert "MB/s measured of 121000.0 MB/s (namespaces); request at most " in server.log
    assert _left(server) == []


@pytest.mark.alone
def test_in_user_space_it_says_so_and_the_rate_it_held(start: Start) -> None:
    server = start("--tp", "2", "--link", "20mbit", "--link-emulation", "user-space")
    url = server.wait_ready()
    link = get(f"{url}/comm").json()["link"]
    assert (link["emulation"], link["reason"]) == ("user-space", "")
    assert 0.9 * 2.5e6 <= link["measured_bytes_per_s"] <= 2.5e6
    assert "link 20mbit between 2 nodes: 2.5 MB/s requested, throttled in user space" in server.log
    why = r"; chosen: [\d.]+ s for 512 prompt tokens and 128 more \(\w+ [\d.]+ s, \w+ [\d.]+ s\)"
    assert re.search(
        rf"  layout     ((hybrid|pipeline): .* pass the ranks in stages of layers .*|tensor){why}", server.log
    )
    assert re.search(r"link 20mbit between 2 nodes: .* MB/s measured of 2.5 MB/s, throttled in user space", server.log)
    assert server.end() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 1, "link": "1gbit"}, "--link must be left out with --tp 1"),
        ({"tp": 2, "link": "fast"}, "--link: 'fast' is not a link; write 200mbit"),
        ({"tp": 2, "link": "1gbit", "transport": "shared-memory"}, "or give --link-emulation user-space"),
        ({"tp": 2, "link_emulation": "namespaces"}, "--link-emulation must be given with --link"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelOptions(**options)  # type: ignore[arg-type]


def test_a_link_is_between_ranks_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="--link emulates a wire between CPU ranks"):
        ServeConfig(model=ModelOptions(device="cuda"), parallel=ParallelOptions(tp=2, link="1gbit"))


def test_a_throttle_that_cannot_be_as_fast_is_refused_without_a_traceback(start: Start) -> None:
    """Found out by the ranks, when they have joined."""
    server = start("--tp", "2", "--link", "pcie6x16", "--link-emulation", "user-space")
    assert server.wait_exit(START_S) == 1
    assert "this machine cannot carry the link pcie6x16: " in server.log
    assert "MB/s measured of 121000.0 MB/s (user-space)" in server.log
    assert "Traceback" not in server.log
