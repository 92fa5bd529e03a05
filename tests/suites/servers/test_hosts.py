"""Two hosts as network namespaces: the answer is that of one host, and the loss of a host ends the other by name."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch
from helpers.server.local_engine import greedy_text
from helpers.server.server_process import SERVE, START_S, ServerProcess, complete, get, wait_until
from tiny import make_tiny

from tightwire.comm.link.emulated_network import EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link


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


def start(folder: Path, node: EmulatedNode, model: Path, *arguments: str, num: int = 2) -> ServerProcess:
    options = ("--port", "0", "--kv-cache-memory", "1MiB", "--nnodes", str(num), "--master-addr", "10.0.0.1")
    options += ("--join-timeout-s", str(START_S / 2), *arguments)  # so that a host that waits says for which
    command = ("nsenter", f"--net=/proc/{node.pid}/ns/net", *SERVE)
    return ServerProcess(folder, str(model), *options, command=command)


_ALGORITHMS = ("hierarchical", "one-shot", "two-shot", "ring", "flash-int8", "hierarchical:int8")
# Sums of a row that depend on no other row of the message. A ring's order over four ranks does, and so do a codec's groups
# of 128 numbers where a row has 64.
_BY_ROW = ("hierarchical", "one-shot", "two-shot")
# Each next token leads by 0.1 or more, in float32 and bfloat16, so that layouts that round differently agree.
_PROMPTS = ("hello", "again and again, " * 10, "x" * 100)


async def ask(client: httpx.AsyncClient, prompt: str, algorithm: str, leave_after: int | None = None) -> str:
    """The text of an answer; of one that the client leaves after some events, what has come until then."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    body["tightwire"] = {"allreduce": algorithm}
    body["cache_salt"] = str(uuid4())  # cached keys of a lossy sum depend on the other rows of their step
    text, num_events = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["text"] if choices else ""
                num_events += 1
            if num_events == leave_after:
                break
    return text


def texts(url: str, at_once: int, algorithms: Sequence[str] = _ALGORITHMS) -> dict[tuple[str, str], set[str]]:
    """By prompt and algorithm: the texts of ``at_once`` requests in flight, of which each eighth client leaves early."""

    async def run() -> dict[tuple[str, str], set[str]]:
        found = defaultdict[tuple[str, str], set[str]](set)
        kinds = [(prompt, algorithm) for algorithm in algorithms for prompt in _PROMPTS]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:
            if at_once == 1:
                return {kind: {await ask(client, *kind)} for kind in kinds}
            chosen = [kinds[i % len(kinds)] for i in range(at_once)]
            leaves = [2 if i % 8 == 7 else None for i in range(at_once)]
            answers = await asyncio.gather(
                *(ask(client, *kind, leave) for kind, leave in zip(chosen, leaves, strict=True))
            )
        for kind, leave, text in zip(chosen, leaves, answers, strict=True):
            if leave is None:
                found[kind].add(text)
        return found

    return asyncio.run(run())


def texts_of_threads(
    model: Path, algorithms: Sequence[str] = ("auto",), **options: Any
) -> dict[tuple[str, str], set[str]]:
    """What ``texts`` finds at a server of this model, from ranks that are threads of this process."""
    options = {"dtype": torch.bfloat16} | options
    return {
        (prompt, algorithm): {greedy_text(model, prompt, 8, **options)}
        for algorithm in algorithms
        for prompt in _PROMPTS
    }


def traced_sites(url: str) -> set[str]:
    """The sites in a trace during which a prompt is answered."""

    async def run() -> set[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            prompt = ask(client, _PROMPTS[0], "auto")
            trace, _ = await asyncio.gather(client.get("/comm/trace?seconds=1"), prompt)
        return {event["args"]["site"] for event in trace.json()["traceEvents"] if event["ph"] == "X"}

    return asyncio.run(run())


@pytest.mark.alone
def test_two_hosts_answer_as_one_for_each_algorithm_and_a_lost_host_ends_the_other(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    same = ("--tp", "4", "--allreduce", _ALGORITHMS[0], "--allreduce-extra", ",".join(_ALGORITHMS[1:]))
    same += ("--overlap", "off")  # between hosts a prompt is summed in halves, which gives a ring another order
    with ServerProcess(
        tmp_path / "one", str(model), "--port", "0", "--kv-cache-memory", "1MiB", "--nodes", "2", *same
    ) as one:
        alone = texts(one.wait_ready(), 1)
        assert one.end() == 0
    nodes = network.nodes
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready(second)
        crowd = nodes[0].visit(lambda: texts(url, 64))
        assert crowd.keys() == alone.keys(), "64 requests, eight cancelled"
        assert all(crowd[kind] == alone[kind] for kind in alone if kind[1] in _BY_ROW)
        assert nodes[0].visit(lambda: texts(url, 1)) == alone
        # Each was tested at start: the same bits on all ranks of both hosts.
        comm = nodes[0].visit(lambda: get(f"{url}/comm").json())
        assert {each["algorithm"] for each in comm["self_test"] if each["ok"]} >= set(_ALGORITHMS)
        wait_until(lambda: "node ready" in second.log, START_S)
        health = second.log.split("health and metrics at ")[1].split(",")[0]
        assert nodes[1].visit(lambda: get(f"{health}/health/ready").status_code) == 200
        trace = nodes[1].visit(lambda: get(f"{health}/comm/trace?seconds=0.2").json())["traceEvents"]
        assert {event["pid"] for event in trace} == {2, 3}, "the ranks of this host"
        refused = nodes[1].visit(lambda: complete(health, 3))
        assert refused.status_code == 503
        assert "this is node 1; send requests to node 0 at 10.0.0.1" in refused.text
        home = nodes[1].visit(lambda: get(f"{health}/").json())
        assert home["status"] == "ready: this is node 1; send requests to node 0 at 10.0.0.1"
        second.process.send_signal(signal.SIGKILL)
        assert first.wait_exit(30) == 1
        # The kernel resets the connection if the killed process had not read all.
        lost = r"node 1 \(10\.0\.0\.2\): lost: it (closed|broke) the connection.* \(last known: rank 0: "
        assert re.search(lost, first.log), first.log


@pytest.mark.alone
def test_prompts_pass_two_hosts_in_stages_and_a_stopped_host_ends_both(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    """With keys and values in 8 bits, which rank 0's stage hands over as they are in its cache."""
    same = ("--tp", "2", "--layout", "hybrid", "--kv-cache-dtype", "int8", "--allreduce-extra", ",".join(_ALGORITHMS))
    nodes = network.nodes
    alone = texts_of_threads(model, _BY_ROW, tp=2, kv_dtype=torch.int8)  # a sum of two has the same bits with each
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready()
        crowd = nodes[0].visit(lambda: texts(url, 64))
        assert crowd == crowd | alone, "64 requests, eight cancelled"
        rows = nodes[0].visit(lambda: get(f"{url}/comm").json())["counters"]
        passed = [row for row in rows if row["op"] == "deliver"]
        assert {row["algorithm"] for row in passed} == {"hidden-state", "kv-heads"}
        assert all(row["seconds"] > 0 for row in passed)
        assert nodes[0].visit(lambda: traced_sites(url)) > {"stage boundary"}, "messages between stages, and sums"
        assert "int8 KV cache for " in first.log
        second.process.send_signal(signal.SIGSTOP)
        assert first.wait_exit(30) == 1
        assert "node 1 (10.0.0.2)" in first.log
        second.process.send_signal(signal.SIGCONT)


def test_prompts_pass_two_hosts_of_two_ranks_and_a_killed_rank_ends_both(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    """A host is a stage, whose ranks sum prompts in memory; all four generate, with sums over the wire."""
    same, nodes = ("--tp", "4", "--layout", "hybrid"), network.nodes
    alone = texts_of_threads(model, tp=4)
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready()
        assert "prompts pass stages of 2 ranks with layers 0 to 0, 1 to 1; the ranks of a stage sum" in first.log
        before = nodes[0].visit(lambda: get(f"{url}/comm").json())["counters"]
        assert nodes[0].visit(lambda: texts(url, 16, ["auto"])) == alone, "16 requests at once, some cancelled"
        rows = nodes[0].visit(lambda: get(f"{url}/comm").json())["counters"]
        assert before != rows and {"hidden-state", "kv-heads"} <= {row["algorithm"] for row in rows}
        os.kill(second.ranks()[-1], signal.SIGKILL)
        assert (first.wait_exit(15), second.wait_exit(15)) == (1, 1)
        assert re.search(r"rank 3 \(.*?\) was killed by SIGKILL", first.log), first.log


@pytest.mark.parametrize("same", [("--tp", "4", "--layout", "pipeline"), ("--tp", "2", "--dp", "2")], ids=str)
def test_hosts_that_sum_inside_answer_as_one_of_them_and_a_killed_rank_ends_both(
    same: tuple[str, ...], network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    """A host is a stage, or has a replica. Its two ranks answer as they would alone with all layers."""
    nodes = network.nodes
    alone = texts_of_threads(model, tp=2)
    with (
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready()
        assert nodes[0].visit(lambda: texts(url, 16, ["auto"])) == alone, "16 requests at once, some cancelled"
        comm = nodes[0].visit(lambda: get(f"{url}/comm").json())
        assert any(row["op"] == "all_reduce" for row in comm["counters"])
        os.kill(second.ranks()[-1], signal.SIGKILL)
        assert (first.wait_exit(15), second.wait_exit(15)) == (1, 1)
        killed = r"rank 3 \(.*?\) was killed by SIGKILL"  # as node 0 heard it, or as node 1 ended
        assert re.search(killed, first.log), first.log


def test_rows_pass_four_hosts_and_the_loss_of_a_link_between_two_ends_all(
    network: EmulatedNetwork, tmp_path: Path
) -> None:
    """In a pipeline, whose answers have the bits of one rank. The lost link does not lead to node 0, and is named with both ends."""
    model = make_tiny(tmp_path / "tiny", num_hidden_layers=4)
    same = "--tp", "4", "--layout", "pipeline", "--rank-timeout-s", "4"
    alone = texts_of_threads(model)
    with EmulatedNetwork(network.link, num_nodes=4) as four, contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(start(tmp_path / str(rank), node, model, "--node-rank", str(rank), *same, num=4))
            for rank, node in enumerate(four.nodes)
        ]
        url, home = hosts[0].wait_ready(*hosts[1:]), four.nodes[0]
        assert home.visit(lambda: texts(url, 1, ["auto"])) == alone
        rows = home.visit(lambda: get(f"{url}/comm").json())["counters"]
        assert {row["algorithm"] for row in rows if row["op"] == "deliver"} == {"hidden-state", "token-ids"}
        # Frames from node 1 to node 2 carry an address that no host has.
        lost = ("ip", "neigh", "replace", four.nodes[2].address, "dev", four.nodes[1].interface)
        four.nodes[1].run(*lost, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        assert home.visit(lambda: complete(url, 8)).status_code >= 500
        assert [host.wait_exit(15) for host in hosts] == [1] * 4
        cause = r"lost rank [12] of 4.*rank [12] at 10\.0\.0\.[23]: no acknowledgement for [45] s"
        assert re.search(cause, hosts[0].log), hosts[0].log


def test_different_options_are_refused_by_node_on_both_hosts(
    network: EmulatedNetwork, model: Path, tmp_path: Path
) -> None:
    nodes, same = network.nodes, ("--tp", "2", "--dtype")
    reason = "node 1 (10.0.0.2) has --dtype float32, node 0 (10.0.0.1) has --dtype bfloat16; start the same command"
    with (
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same, "bfloat16") as first,
        start(tmp_path / "b", nodes[1], model, "--node-rank", "1", *same, "float32") as second,
    ):
        assert (first.wait_exit(START_S), second.wait_exit(START_S)) == (2, 2)
        assert reason in first.log
        assert reason in second.log


@pytest.mark.alone
def test_a_host_without_the_model_gets_it_and_loss_in_one_direction_ends_both_by_name(
    network: EmulatedNetwork, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, timeout_s = network.nodes, 3.0
    same = ("--tp", "2", "--rank-timeout-s", str(timeout_s))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    nowhere = tmp_path / "nowhere" / "tiny"
    with (
        start(tmp_path / "b", nodes[1], nowhere, "--node-rank", "1", *same) as second,
        start(tmp_path / "a", nodes[0], model, "--node-rank", "0", *same) as first,
    ):
        url = first.wait_ready(second)
        assert f"this host has no copy of {nowhere}; node 0 will send it" in second.log
        assert re.search(r"^ +import +\d", second.log, re.MULTILINE), "its own rank's stages are shown as ended"
        assert list((tmp_path / "cache").rglob("model.safetensors")), "kept for the next start"
        comm = nodes[0].visit(lambda: get(f"{url}/comm").json())
        assert comm["link"]["emulation"] == "network", "probed at start"
        assert comm["link"]["pairs"][0]["nodes"] == [0, 1]
        # Frames from node 0 to node 1 carry an address that no host has; those from node 1 arrive.
        neighbour = ("ip", "neigh", "replace", "10.0.0.2", "dev", nodes[0].interface)
        nodes[0].run(*neighbour, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        try:
            began = time.monotonic()
            assert (first.wait_exit(60), second.wait_exit(60)) == (1, 1)
            # Some messages of node 1 still arrive after the loss; a host ends that long after it notices.
            assert time.monotonic() - began < timeout_s + 6.0
        finally:
            nodes[0].run("ip", "neigh", "del", "10.0.0.2", "dev", nodes[0].interface)
        assert "node 1 (10.0.0.2): lost: it has been silent for 3 s (last known: rank 0: " in first.log
        assert "node 0 (10.0.0.1:29600): lost: it has been silent for 3 s (last known: rank 1: " in second.log
