"""Runs ``tightwire train`` on nodes that a slow link joins, all on this machine, and says what each node sent in a step.

    sudo python tools/training_on_nodes.py 200mbit 2x1 grpo parallel.sharding=zero3 schedule.steps=3

2x1: two nodes of one rank. Each node is a network namespace with its share of the cores. The table has the seconds of each step, of
answering its prompts, and the bytes that rank 0 sent in both, from metrics.jsonl of the run, whose folder the argument ``run=`` names.
"""

import json
import subprocess
import sys
from pathlib import Path

from tightwire.bench.hosts import EmulatedHosts

COLUMNS = ("seconds", "answer_s", "wire_bytes", "answer_wire_bytes", "memory_bytes")


def main(link: str, ranks: str, *argv: str) -> int:
    num_nodes, num_ranks = map(int, ranks.split("x"))
    folder = Path(next(word.removeprefix("run=") for word in reversed(argv) if word.startswith("run=")))
    with EmulatedHosts(link, num_nodes) as hosts:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(num_nodes),
            "--nproc-per-node",
            str(num_ranks),
        ]
        meeting = ["--master-addr", hosts.addresses[0], "--master-port", "29500"]
        before = hosts.sent()
        nodes = [
            subprocess.Popen(
                hosts.on(node, [*torchrun, *meeting, "--node-rank", str(node), "-m", "tightwire", "train", *argv])
            )
            for node in range(num_nodes)
        ]
        status = max(node.wait() for node in nodes)
        sys.stdout.write(f"node 0 sent {hosts.sent().since(before).bytes:,} bytes in all, headers counted\n")
    rows = [["step", *COLUMNS]]
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        rows.append([str(step["step"]), *(f"{step[name]:,.4g}" if name in step else "-" for name in COLUMNS)])
    sys.stdout.writelines("  ".join(row) + "\n" for row in rows)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
