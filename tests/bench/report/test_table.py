"""Tables on terminals of any width: columns are left out, digits never."""

from io import StringIO

import pytest
from rich.console import Console

from tightwire.bench.report.table import Column, Table, print_table

COLUMNS = [
    Column("algorithm", "name"),
    *(Column(name, name, ",.1f", detail=name != "p50") for name in ("n", "mean", "std", "p50", "p99")),
    Column("ratio [95 %]", "ratio", lambda ratio: f"{ratio:.3f} [{ratio:.3f}, {ratio:.3f}]"),
    Column("verdict", "verdict"),
]
ROW = {"name": "flash:int4-g64-had,int8-g64", "n": 36, "mean": 1031.4, "std": 12.25, "p50": 1029.8, "p99": 1100.1}
ROWS = [ROW | {"ratio": 0.871, "verdict": "too few rounds"}]


def printed(width: int) -> str:
    out = StringIO()
    print_table(Console(file=out, width=width), Table(columns=COLUMNS, rows=ROWS, title="TTFT, ms"))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_digits_are_never_cut(width: int) -> None:
    text = printed(width)

    assert "…" not in text and "..." not in text
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith("not in"))
    left_out = text.partition("columns: ")[2].strip().split(", ")
    for column in COLUMNS[1:-1]:
        assert (column.text(ROWS[0]) in text) != (column.name in left_out), column.name


def test_a_column_without_any_value_is_not_shown() -> None:
    out = StringIO()
    columns = [Column("name", "name"), Column("empty", "empty", "d"), Column("n", "n", "d")]
    print_table(Console(file=out, width=80), Table(columns=columns, rows=[{"name": "a", "empty": None, "n": 1}]))

    assert "empty" not in out.getvalue() and "n" in out.getvalue()


def test_details_are_left_out_first_from_the_right() -> None:
    assert "not in" not in printed(120)
    assert "not in 100 columns: p99\n" in printed(100) and "not in 80 columns: n, mean, std, p99\n" in printed(80)
