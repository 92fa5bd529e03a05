"""Draws time to first token against the wire's rate from results of ``tightwire bench lab peers --nnodes``.

python bench/lab/peers/plot_hosts.py OUT.svg RESULT.json RESULT.json ...
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightwire.bench.report.plot import lines, svg
from tightwire.bench.report.table import Column

_RATE = Column("Mbit/s of each host's wire", "rate", ",.0f", 8e-6)
_TTFT = Column("time to first token, s", "ttft", ".1f")


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """SVG with one line a server; rates are the measured ones. Dashed: gloo and other servers."""
    rows = [
        {"server": cell["server"], "rate": result["link"]["measured_bytes_per_s"], "ttft": cell["medians"]["ttft_s"]}
        for result in results
        for cell in result["cells"]
    ]
    load, nnodes = results[0]["load"], results[0]["nnodes"]
    return svg(
        lines(
            f"{nnodes} hosts, a prompt of {load['input_len']} tokens",
            rows,
            by="server",
            x=_RATE,
            y=_TTFT,
            log_y=False,
            dashed=lambda server: not server.startswith("tightwire") or "gloo" in server,
        )
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw([json.loads(Path(word).read_text()) for word in sys.argv[2:]]))
