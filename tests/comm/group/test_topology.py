"""Which rank am I: torchrun's variables, and the ways they can be wrong."""

import pytest

from tightwire.comm.group.topology import Topology


def test_reads_torchruns_variables() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Topology.from_environment(environment) == Topology(5, 8, 1)


def test_alone_without_them() -> None:
    assert Topology.from_environment({}) == Topology(0, 1)


def test_local_rank_is_the_rank_on_one_host() -> None:
    assert Topology(3, 4).local_rank == 3
    assert Topology.from_environment({"RANK": "2", "WORLD_SIZE": "4"}).local_rank == 2


def test_ranks_are_numbered_node_by_node() -> None:
    places = [Topology(rank, 6, num_nodes=3) for rank in range(6)]
    assert [(at.node, at.node_rank) for at in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [at.local_rank for at in places] == list(range(6))  # all on this host, whatever is called a node


def test_reads_the_nodes_from_torchruns_variables() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    at = Topology.from_environment(environment)
    assert at == Topology(5, 8, 1, num_nodes=4) and (at.node, at.node_rank) == (2, 1)


@pytest.mark.parametrize("num_nodes", [0, -1, 4, 5, 7])
def test_refuses_uneven_nodes(num_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"6 ranks cannot be on {num_nodes} nodes, .* may be 1, 2, 3, 6"):
        Topology(0, 6, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank must be 0 to 1, got 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank must be 0 to 1, got -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world_size must be at least 1"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "7"}, "local_rank must be 0 to"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"},
            "LOCAL_WORLD_SIZE=3 of 4 ranks, so nodes are uneven",
        ),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"}, "nodes are uneven"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "numbered node by node, which would make it 1",
        ),
    ],
)
def test_says_what_is_wrong(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Topology.from_environment(environment)
