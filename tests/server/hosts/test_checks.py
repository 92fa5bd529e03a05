"""What hosts compare: their numbers, their plans, and the ports between them."""

import socket

import msgspec
import pytest
from helpers.server.hosts import PLAN, free_ports

from tightwire.comm.link import probe as link_probe
from tightwire.server.hosts.checks import measure, merge_plans, objection_to, probe
from tightwire.server.hosts.messages import Hello


async def test_a_port_that_cannot_be_reached_is_named() -> None:
    port = free_ports(1)
    failures = await probe(1, {1: ("127.0.0.1", [1]), 2: ("127.0.0.1", [port])})
    assert len(failures) == 1
    assert failures[0].startswith(f"port {port} on node 2 (127.0.0.1) cannot be reached from node 1: ")


async def test_messages_that_are_lost_where_connections_pass_are_told_with_what_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_probe, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, failures = await measure(0, {1: ("127.0.0.1", silent.getsockname()[1])})
    cause = "timed out; if only long messages are lost, lower the MTU of the interfaces"
    assert failures == [f"the probe from node 0 to node 1 (127.0.0.1) failed: {cause}"]


def test_a_node_number_out_of_range_is_refused() -> None:
    own = Hello(0, "10.0.0.1", "eth0", [], {}, 0)
    reason = objection_to(Hello(5, "10.0.0.9", "eth0", [], {}, 0), own, 3)
    assert reason == "a host at 10.0.0.9 says that it is node 5; nodes are 1 to 2 there"


def test_of_several_differences_the_first_by_name_is_told() -> None:
    """And so --nnodes, not --nodes, which follows from it and is refused with it."""
    own, other = ({"--nodes": n, "--tp": n, "--nnodes": n, "version": "1"} for n in ("2", "3"))
    reason = objection_to(Hello(1, "b", "", [], other, 0), Hello(0, "a", "", [], own, 0), 2)
    assert reason == "node 1 (b) has --nnodes 3, node 0 (a) has --nnodes 2; start the same command on every host"


@pytest.mark.parametrize(
    ("levels", "least"), [(("v4-amx", "v4-bf16"), "v4-bf16"), (("neon", "v3"), "spec"), (("v4", "spec"), "spec")]
)
def test_the_level_of_kernels_that_is_advised_runs_on_both_hosts(levels: tuple[str, str], least: str) -> None:
    first, second = (Hello(node, "a", "", [], {"kernels": level}, 0) for node, level in enumerate(levels))
    reason = objection_to(second, first, 2)
    assert reason is not None
    assert reason.endswith(f"to a level that every CPU has, such as {least}, on every host")


def test_plans_that_differ_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match="node 1 would run with dtype float32, node 0 with bfloat16"):
        merge_plans({0: PLAN, 1: msgspec.structs.replace(PLAN, dtype="float32")})
