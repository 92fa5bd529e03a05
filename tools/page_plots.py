"""Draws pictures of README, docs and RESULTS from tables of their pages. ``python tools/page_plots.py`` after such a table changes.

A picture and its table so have the same numbers. The other pictures are copied from the pages of `bench ttft` and `bench train`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tightwire.bench.report.plot import lines, svg
from tightwire.bench.report.table import Column

ROOT = Path(__file__).resolve().parents[1]


def read_table(page: str, first: str) -> list[dict[str, str]]:
    """The rows of the page's first table whose first column is called ``first``, by column."""
    table = page[page.index(f"| {first} |") :].split("\n\n")[0]
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    names = next(rows)
    next(rows)  # the alignments
    return [dict(zip(names, cells, strict=True)) for cells in rows]


def hosts_plot(results: str) -> str:
    """SVG: time to first token over the wire's rate. Gloo and llama.cpp are dashed."""
    first = "TTFT(512) ms, a token ms"
    points = [
        {
            "server": row[first],
            "mbit": float(rate[1]) * (1000 if rate[2] == "G" else 1),
            "ms": float(cell.split(",")[0]),
        }
        for row in read_table(results, first)
        for name, cell in row.items()
        if (rate := re.fullmatch(r"(\d+) ([MG])bit/s", name)) and cell
    ]
    x, y = Column("Mbit/s of each host's wire", "mbit", ",.0f"), Column("time to first token, s", "ms", ".1f", 1e-3)
    return svg(
        lines(
            "Two hosts",
            points,
            by="server",
            x=x,
            y=y,
            dashed=lambda name: "gloo" in name or "llama" in name,
            ticks=True,
        )
    )


def front_plot(page: str) -> str:
    """SVG: KL of the next tokens over bits, a line for each family of formats."""
    points = [
        {"family": _family(row["name"]), "bits": float(row["bits"]), "kl": float(row["KL"])}
        for row in read_table(page, "name")
    ]
    x, y = Column("bits a number, with scales", "bits", ".2f"), Column("mean KL of next tokens, nats", "kl", ".2g")
    return svg(lines("KL", points, by="family", x=x, y=y, log_x=False))


def _family(name: str) -> str:
    if name.startswith("AMD"):
        return "AMD, exponent for each row" if name.endswith("rows") else "AMD"
    if name.startswith("uniform"):
        return "uniform (one scale a row)"
    return "article (groups of 128)" if name.endswith("-plain") or "legs" in name else "Tightwire"


def plots() -> Iterator[tuple[Path, str]]:
    """Each picture and its text."""
    yield ROOT / "docs" / "several-hosts.svg", hosts_plot((ROOT / "bench" / "RESULTS.md").read_text())
    page = (ROOT / "docs" / "quantized-allreduce.md").read_text()
    yield ROOT / "bench" / "plots" / "quantized-front.svg", front_plot(page.partition("### Signal to noise")[2])


if __name__ == "__main__":
    for path, text in plots():
        path.write_text(text)
