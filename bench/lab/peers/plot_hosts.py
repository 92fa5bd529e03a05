"""Draws time to first token against the wire's rate from results of ``tightwire bench peers --nnodes``.

python bench/lab/peers/plot_hosts.py OUT.svg RESULT.json RESULT.json ...
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt


def draw(out: Path, results: list[Path]) -> None:
    """One line a server; rates are the measured ones."""
    plt.rcParams |= {"svg.hashsalt": "hosts", "svg.fonttype": "none"}
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    found = [json.loads(path.read_text()) for path in results]
    for result in found:
        for cell in result["cells"]:
            points[cell["server"]].append((result["link"]["measured_bytes_per_s"] * 8 / 1e6, cell["medians"]["ttft_s"]))
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for server, own in points.items():
        style = "-" if server.startswith("tightwire") and "gloo" not in server else "--"
        axes.plot(*zip(*sorted(own), strict=True), style, marker="o", label=server)
    load = found[0]["load"]
    axes.set(xscale="log", ylim=0, xlabel="Mbit/s of each host's wire", ylabel="time to first token, s")
    axes.set_title(f"{found[0]['nnodes']} hosts, a prompt of {load['input_len']} tokens", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
