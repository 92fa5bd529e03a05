"""Which rank am I: torchrun's variables, and the ways they can be wrong."""

import pytest

from tightwire.comm.topology import Topology


def test_reads_torchruns_variables() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Topology.from_environment(environment) == Topology(5, 8, 1)


def test_alone_without_them() -> None:
    assert Topology.from_environment({}) == Topology(0, 1)


def test_local_rank_is_the_rank_on_one_host() -> None:
    assert Topology(3, 4).local_rank == 3
    assert Topology.from_environment({"RANK": "2", "WORLD_SIZE": "4"}).local_rank == 2


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
    ],
)
def test_says_what_is_wrong(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Topology.from_environment(environment)
