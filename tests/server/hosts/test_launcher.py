"""Which variable of which launcher gives which option, and which combinations are refused."""

import pytest

from tightwire.server.config import flags
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import first_host, resolve_hosts

_TORCHRUN = {
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
_SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[03-04,7],big1"}
_LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "llama-0.llama.default"}


def parse(*argv: str) -> ServeConfig:
    return flags.parse(flags.make_parser("serve", "Serve."), argv)[0]


@pytest.mark.parametrize(
    ("variables", "master", "source"),
    [
        (_TORCHRUN, "10.0.0.1", "torchrun's GROUP_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "h", "torchrun's RANK"),
        (_SLURM, "gpu03", "Slurm's SLURM_NODEID"),
        (_LWS, "llama-0.llama.default", "LeaderWorkerSet's LWS_WORKER_INDEX"),
        (_SLURM | _LWS, "llama-0.llama.default", "LeaderWorkerSet's LWS_WORKER_INDEX"),
    ],
)
def test_a_launcher_gives_the_values_and_is_named(variables: dict[str, str], master: str, source: str) -> None:
    config, notes = resolve_hosts(parse("--tp", "4"), variables)
    assert (config.hosts.nnodes, config.hosts.node_rank, config.hosts.master_addr) == (2, 1, master)
    assert (config.parallel.nodes, config.parallel.transport) == (2, "auto")
    assert f"--node-rank 1: from {source}" in notes


def test_flags_win_over_variables() -> None:
    config, notes = resolve_hosts(parse("--tp", "2", "--node-rank", "0", "--master-addr", "h:5"), _SLURM)
    assert (config.hosts.node_rank, config.hosts.master_addr) == (0, "h:5")
    assert notes == ["--nnodes 2: from Slurm's SLURM_NNODES"]
    assert resolve_hosts(parse("--nnodes", "1"), _SLURM) == (parse("--nnodes", "1"), [])


def test_without_a_launcher_there_is_one_host() -> None:
    assert resolve_hosts(parse(), {}) == (parse(), [])
    assert resolve_hosts(parse(), _LWS | {"LWS_GROUP_SIZE": "1"}) == (parse(), [])


@pytest.mark.parametrize(
    ("argv", "variables", "message"),
    [
        (["--tp", "2", "--nnodes", "2"], {}, "--nnodes 2 needs --node-rank; no variable of torchrun, Slurm"),
        (["--tp", "2", "--nnodes", "2", "--node-rank", "1"], {}, "--nnodes 2 needs --master-addr"),
        (["--tp", "3"], _SLURM, "--tp 3 is no multiple of the 2 hosts"),
        (["--tp", "2", "--dp", "3"], _SLURM, "--dp 3 is no multiple of the 2 hosts"),
        (["--tp", "4", "--nodes", "4"], _SLURM, "leave them out with several hosts"),
        (["--tp", "2", "--transport", "shared-memory"], _SLURM, "is inside one host"),
        (["--tp", "2", "--port-range", "5-6"], _SLURM, "must hold 5 ports"),
        (["--master-addr", "h"], {}, "--master-addr h is for several hosts; add --nnodes N"),
        (["--tp", "4"], _TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, "starts 2 processes on this node"),
        (["--tp", "4"], _SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "Slurm starts 2 processes on this node"),
        (["--tp", "3"], _SLURM, r"--nnodes 2: from Slurm's SLURM_NNODES; .*; --nnodes 1 ignores the variables"),
        (["--tp", "2", "--port-range", "29600-29700"], _SLURM, "contains 29600, the port of --master-addr"),
        (["--tp", "2"], _SLURM | {"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, got 'one'"),
    ],
)
def test_what_cannot_work_is_refused(argv: list[str], variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_hosts(parse(*argv), variables)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node1", "node1"),
        ("a[03-07,12],b", "a03"),
        ("a,b[1-2]", "a"),
        ("x[1,5]-ib", "x1-ib"),
        ("rack1-n[007]", "rack1-n007"),
    ],
)
def test_the_first_host_of_slurms_list(names: str, first: str) -> None:
    assert first_host(names) == first
