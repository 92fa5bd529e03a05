"""Which of the three kinds of hosts a process is, and what must be equal on all of them."""

import pytest
from helpers.server.hosts import Told, free_ports, joining

from tightwire.server.config.flags import make_parser, parse
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.base import Hosts
from tightwire.server.hosts.choose import choose_hosts, facts_of
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member


def _config(*argv: str) -> ServeConfig:
    return parse(make_parser("serve", "Serve."), argv)[0]


@pytest.mark.parametrize(
    ("node", "kind", "refusal"), [(0, Head, ""), (1, Member, "this is node 1; send requests to node 0 at 127.0.0.1")]
)
async def test_several_hosts_are_node_0_and_others(node: int, kind: type, refusal: str) -> None:
    place = joining(node, free_ports(6), Told()).place
    hosts = choose_hosts(ServeConfig(), place, range(node, node + 1), None, Told())
    assert type(hosts) is kind and hosts.refusal == refusal
    await hosts.close()


def test_without_a_place_among_others_there_is_one_host() -> None:
    assert type(choose_hosts(ServeConfig(), None, range(2), None, Told())) is Hosts


def test_facts_are_the_options_that_must_be_equal() -> None:
    facts = facts_of(_config("--tp", "4", "--node-rank", "1", "--port", "9"))
    assert facts["--tp"] == "4"
    assert not {"--node-rank", "--port", "--model", "--interface"} & facts.keys()
