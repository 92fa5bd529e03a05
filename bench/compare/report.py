"""How a comparison is shown and kept: a table for eyes, JSON, CSV, a page with the intervals."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tightwire.bench.report.result_files import ResultFiles

COLUMNS = ("A", "B", "B / A", "95 % interval", "n", "verdict")
_CSV_COLUMNS = [
    *("cell", "metric", "unit", "a", "b", "ratio", "low", "high", "n", "paired", "verdict", "regression"),
]


def show(console: Console, result: dict[str, Any]) -> None:
    """Print every cell, what is unlike, and the sum of it."""
    table = Table(title=escape(head(result)), title_justify="left", title_style="bold")
    table.add_column("cell")
    table.add_column("metric")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for cell in result["cells"]:
        texts = map(escape, (cell["cell"], metric_text(cell), *cell_texts(cell)))
        table.add_row(*texts, style="red" if cell["regression"] else None)
    console.print(table)
    for words in result["differences"]:
        console.print(f"note: {words}", style="yellow", markup=False, soft_wrap=True)
    for words in result["faults"]:
        console.print(words, style="red", markup=False, soft_wrap=True)
    console.print(conclusion(result), markup=False, soft_wrap=True)


def head(result: dict[str, Any]) -> str:
    return f"bench {result['kind']}: A is {_name(result['a'])}, B is {_name(result['b'])}"


def metric_text(cell: dict[str, Any]) -> str:
    return f"{cell['metric'].removesuffix('_s')}{', ' if cell['unit'] else ''}{cell['unit']}"


def cell_texts(cell: dict[str, Any]) -> list[str]:
    """The cell under ``COLUMNS``."""
    return [
        f"{cell['a']:,.4g}",
        f"{cell['b']:,.4g}",
        f"{cell['ratio']:.3f}",
        "unknown" if cell["verdict"] == "too few" else f"{cell['low']:.3f} to {cell['high']:.3f}",
        str(cell["n"]),
        cell["verdict"],
    ]


def conclusion(result: dict[str, Any]) -> str:
    """What the exit status says, in words."""
    deciding = ", ".join(result["deciding"])
    limit = f"{100 * result['tolerance']:g} %"
    if result["regressions"]:
        count = f"{result['regressions']} regression{'s' * (result['regressions'] > 1)}"
        return f"{count}: by {deciding}, B is worse by more than {limit}, interval and all"
    few = sum(cell["verdict"] == "too few" for cell in result["cells"] if cell["metric"] in result["deciding"])
    unsure = f"; {few} of them have too few samples to tell: measure more" if few else ""
    return f"no regression: by {deciding}, no cell of B is surely worse by more than {limit}{unsure}"


def keep(files: ResultFiles, result: dict[str, Any]) -> None:
    # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
    from tightwire.bench.compare.page import make_page

    files.write_json(result)
    files.write_csv(_CSV_COLUMNS, result["cells"])
    files.write_html(make_page(result))


def _name(side: dict[str, Any]) -> str:
    return f"{side['path']} ({side['label']})" if side["label"] else side["path"]
