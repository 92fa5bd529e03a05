"""Two hosts as network namespaces: the answer is that of one host, and the loss of a host ends the other by name."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.server.server_process import SERVE, START_S, ServerProcess, complete, get, wait_until
from tiny import make_tiny

from tightwire.comm.link.emulated_network import EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    try:
        network = EmulatedNetwork(parse_link("1gbit"))
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")
    with network:
        yield network


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def start(folder: Path, node: EmulatedNode, model: Path, *arguments: str) -> ServerProcess:
    options = ("--port", "0", "--kv-cache-memory", "1MiB", "--nnodes", "2", "--master-addr", "10.0.0.1", *arguments)
    command = ("nsenter", f"--net=/proc/{node.pid}/ns/net", *SERVE)
    return ServerProcess(folder, str(model), *options, command=command)


def test_two_hosts_answer_as_one_and_a_lost_host_ends_the_other(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    same = ("--tp", "4", "--allreduce", "hierarchical")
    with ServerProcess(
        tmp_path / "one", str(model), "--port", "0", "--kv-cache-memory", "1MiB", "--nodes", "2", *same
    ) as one:
        alone = complete(one.wait_ready(), 12).json()["choices"][0]["text"]
        assert one.end() == 0
    nodes = network.nodes
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready()
        assert nodes[0].visit(lambda: complete(url, 12).json()["choices"][0]["text"]) == alone
        wait_until(lambda: "node ready" in second.log, START_S)
        health = second.log.split("health and metrics at ")[1].split(",")[0]
        assert nodes[1].visit(lambda: get(f"{health}/health/ready").status_code) == 200
        refused = nodes[1].visit(lambda: complete(health, 3))
        assert refused.status_code == 503
        assert "this is node 1; send requests to node 0 at 10.0.0.1" in refused.text
        second.process.send_signal(signal.SIGKILL)
        assert first.wait_exit(30) == 1
        assert "node 1 (10.0.0.2): lost: it closed the connection (last known: rank 0: " in first.log


def test_different_options_are_refused_by_node_on_both_hosts(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    nodes, reason = network.nodes, "node 1 (10.0.0.2) has --tp 4, node 0 (10.0.0.1) has --tp 2; start the same command"
    with (
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", "--tp", "2") as first,
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", "--tp", "4") as second,
    ):
        assert (first.wait_exit(START_S), second.wait_exit(START_S)) == (2, 2)
        assert reason in first.log
        assert reason in second.log


def test_loss_in_one_direction_ends_both_hosts_by_name(network: EmulatedNetwork, model: Path, tmp_path: Path) -> None:
    nodes, timeout_s = network.nodes, 3.0
    same = ("--tp", "2", "--rank-timeout-s", str(timeout_s))
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready()
        health = nodes[0].visit(lambda: get(f"{url}/comm").json())
        assert health["link"]["emulation"] == "network", "probed at start"
        assert health["link"]["pairs"][0]["nodes"] == [0, 1]
        # Frames from node 0 to node 1 carry an address that no host has; those from node 1 arrive.
        neighbour = ("ip", "neigh", "replace", "10.0.0.2", "dev", nodes[0].interface)
        nodes[0].run(*neighbour, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        try:
            began = time.monotonic()
            assert (first.wait_exit(60), second.wait_exit(60)) == (1, 1)
            # Some messages of node 1 still arrive after the loss; a host ends 3 s after it notices.
            assert time.monotonic() - began < timeout_s + 6.0
        finally:
            nodes[0].run("ip", "neigh", "del", "10.0.0.2", "dev", nodes[0].interface)
        assert "node 1 (10.0.0.2): lost: it has been silent for 3 s (last known: rank 0: " in first.log
        assert "node 0 (10.0.0.1:29600): lost: it has been silent for 3 s (last known: rank 1: " in second.log
