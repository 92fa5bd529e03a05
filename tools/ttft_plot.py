"""Draws the AllReduce's share of the time to first token by prompt length, from the JSON files of several `bench ttft`.

    python tools/ttft_plot.py OUT.svg results/tp2.json results/tp4.json ...

There is a line for each number of ranks and AllReduce, with the fewest requests at a time. Printed are the medians as a table of
Markdown: milliseconds to the first token, and in brackets the share, which includes the wait for slower ranks. It is of the prompt's
own steps: what requests at the same time wait for each other is left out.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightwire.bench.report.plot import lines, svg
from tightwire.bench.report.table import Column


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The cells of all files, interrupted ones too; ``auto``, which repeats one of the others, is left out. ValueError: no `bench ttft`, or it failed."""
    rows = []
    for path in paths:
        result = json.loads(path.read_text())
        if not str(result.get("schema")).startswith("tightwire.bench.ttft/") or result["error"] not in (
            None,
            "interrupted",
        ):
            raise ValueError(f"{path} is no result of a `tightwire bench ttft --output DIR` that did not fail")
        for cell in result["cells"]:
            if cell["arm"] == "auto":
                continue
            parts = [cell["parts_s"][part] or 0.0 for part in ("allreduce_s", "compute_s", "codec_s")]
            series = f"TP {result['tp']}, {cell['arm']}, {cell['concurrency']} at a time"
            share = parts[0] / sum(parts)
            figures = {"tokens": cell["prompt_len"], "share": share, "ttft_s": cell["ttft_s"]["p50"]}
            rows.append({"series": series, "concurrency": cell["concurrency"], **figures})
    return rows


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """SVG: the share over the prompt's length, with as few requests at a time as there are."""
    fewest = min(row["concurrency"] for row in rows)
    own = [row for row in rows if row["concurrency"] == fewest]
    x, y = Column("prompt tokens", "tokens", "d"), Column("AllReduce's share, %", "share", ".0f", 100)
    return svg(lines("AllReduce's share of a prompt's steps", own, by="series", x=x, y=y, ticks=True, log_y=False))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each series, a column for each length."""
    lengths = sorted({row["tokens"] for row in rows})
    found = {(row["series"], row["tokens"]): f"{1e3 * row['ttft_s']:,.0f} ({row['share']:.0%})" for row in rows}
    cells = [["TTFT, ms (share)", *map(str, lengths)], ["---", *["--:"] * len(lengths)]]
    for series in dict.fromkeys(row["series"] for row in rows):
        cells.append([series, *(found.get((series, length), "") for length in lengths)])
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        sys.stderr.write("usage: python tools/ttft_plot.py OUT.svg RESULT.json ...\n")
        return 2
    try:
        rows = read_rows([Path(name) for name in argv[1:]])
        Path(argv[0]).write_text(plot(rows))
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"ttft_plot: {error}\n")
        return 1
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
