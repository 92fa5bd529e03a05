"""On several hosts, LeaderWorkerSet, Slurm and systemd give each server its place among them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.server.server_process import START_S, complete, is_alive, wait_until
from tiny import make_tiny

from tightwire.comm.link.emulated_network import EmulatedNetwork, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link
from tightwire.server.config import flags
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import resolve_hosts

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "slurm" / "tightwire.sbatch"
# Starts its command once in each network namespace, as srun does on each node of a job.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
node=0
trap 'kill $(jobs -p); wait; exit 143' TERM
for pid in $NAMESPACES; do
  SLURM_NNODES=2 SLURM_NODEID=$node exec nsenter "--net=/proc/$pid/ns/net" "$@" 2>"$LOGS/node$node" &
  node=$((node + 1))
done
wait -n; code=$?; kill $(jobs -p); wait; exit $code
"""


def parse(argv: list[str]) -> ServeConfig:
    assert argv[0] == "serve"
    return flags.parse(flags.make_parser("serve", "Serve."), argv[1:])[0]


@pytest.mark.parametrize("worker", [0, 1])
def test_the_pods_of_a_leader_worker_set_find_their_place(worker: int) -> None:
    lws = next(yaml.safe_load_all((DEPLOY / "lws" / "two-hosts.yaml").read_text()))
    template: dict[str, Any] = lws["spec"]["leaderWorkerTemplate"]
    assert "leaderTemplate" not in template  # the same command on each
    variables = {
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": str(worker),
        "LWS_LEADER_ADDRESS": "tightwire-0.tightwire.default",
    }
    config, _ = resolve_hosts(parse(template["workerTemplate"]["spec"]["containers"][0]["args"]), variables)
    place = config.hosts
    assert (place.nnodes, place.node_rank, place.master_addr) == (2, worker, "tightwire-0.tightwire.default")


def test_the_slurm_script_starts_the_same_command_on_each_node(tmp_path: Path) -> None:
    for name, text in {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'node03\\nnode04\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[03-04]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8"}
    own = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    started = subprocess.run(
        ["bash", SCRIPT, "some/model", "--dtype", "float32"],
        env=own,
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert started.returncode == 0, started.stderr
    tunnel, *srun = started.stdout.splitlines()
    assert "ssh -L 8000:127.0.0.1:8000 node03" in tunnel
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=1"} <= set(srun)
    config = parse(srun[srun.index("serve") :])
    assert (config.model.model, config.model.dtype, config.parallel.tp) == ("some/model", "float32", 2)
    for node in range(2):
        task = {**job, "SLURM_NNODES": "2", "SLURM_NODEID": str(node), "SLURM_NTASKS_PER_NODE": "1"}
        place = resolve_hosts(config, task)[0].hosts
        assert (place.nnodes, place.node_rank, place.master_addr) == (2, node, "node03")


@pytest.mark.parametrize(("name", "nnodes"), [("one-host", None), ("two-hosts", 2)])
def test_the_option_files_for_systemd_are_valid(name: str, nnodes: int | None) -> None:
    config = parse(["serve", "--config", str(DEPLOY / "systemd" / f"{name}.yaml")])
    resolved, notes = resolve_hosts(config, {})
    assert (resolved.hosts.nnodes, notes) == (nnodes, [])


@pytest.mark.alone
def test_the_slurm_script_serves_from_two_hosts(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    (tmp_path / "tightwire").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tightwire "$@"\n')
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf '10.0.0.1\\n10.0.0.2\\n'\n")
    (tmp_path / "srun").write_text(SRUN)
    for name in ("tightwire", "scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    try:
        network = EmulatedNetwork(parse_link("1gbit"))
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")

    def log(node: int) -> str:
        path = tmp_path / f"node{node}"
        return path.read_text() if path.exists() else ""

    with network:
        own = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(DEPLOY.parent / "src"),
            "OMP_NUM_THREADS": "1",
            "NAMESPACES": " ".join(str(node.pid) for node in network.nodes),
            "LOGS": str(tmp_path),
            "TIGHTWIRE": str(tmp_path / "tightwire"),
            "SLURM_JOB_NODELIST": "10.0.0.1,10.0.0.2",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_ON_NODE": "1",
        }
        job = subprocess.Popen(["bash", SCRIPT, str(model), "--kv-cache-memory", "1MiB"], env=own)
        try:
            wait_until(lambda: job.poll() is not None or "ready in" in log(0), START_S)
            assert "--node-rank 0: from Slurm's SLURM_NODEID" in log(0), log(0)
            assert "--node-rank 1: from Slurm's SLURM_NODEID" in log(1), log(1)
            answer = network.nodes[0].visit(lambda: complete("http://127.0.0.1:8000", 12))
            assert answer.json()["usage"]["completion_tokens"] == 12
            ranks = [int(text) for text in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(60)
        assert len(ranks) == 2
        wait_until(lambda: not any(is_alive(pid) for pid in ranks), 60)
