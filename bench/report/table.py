"""The schema of every bench's cells: columns of a table for terminal, CSV and page, and metrics for ``bench compare``."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One value of each row.

    ``key`` is a path into the row, such as ``seconds.p50``, and the heading in CSV files. ``format`` is a function of the
    value, or a format spec for ``scale * value``. A column without a format holds words and is aligned left. A missing
    value is shown as ``-``.
    """

    name: str
    key: str
    format: str | Callable[[Any], str] = ""
    scale: float = 1.0

    def value(self, row: Row) -> Any:
        """The raw value, None where the row lacks it."""
        value: Any = row
        for name in self.key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def scaled(self, row: Row) -> Any:
        """The value in the unit of the column's name, None where the row lacks it."""
        value = self.value(row)
        return value if value is None or self.scale == 1.0 else value * self.scale

    @property
    def is_word(self) -> bool:
        return not self.format

    def text(self, row: Row) -> str:
        value = self.value(row)
        if value is None:
            return "-"
        if callable(self.format):
            return self.format(value)
        return format(self.scaled(row), self.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of plain data under columns. ``wrong`` picks faulty rows; ``note`` stands below the title on a page."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    note: str = ""
    wrong: Callable[[Row], bool] = lambda row: False

    def csv(self) -> str:
        """Raw values under their keys; None is an empty cell."""
        text = StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([column.key for column in self.columns])
        writer.writerows([column.value(row) for column in self.columns] for row in self.rows)
        return text.getvalue()


def print_table(console: Console, table: Table) -> None:
    shown = RichTable(
        title=escape(table.title) or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(table.columns):
        shown.add_column(escape(column.name), justify="left" if column.is_word else "right", no_wrap=number == 0)
    for row in table.rows:
        style = "red" if table.wrong(row) else None
        shown.add_row(*(escape(column.text(row)) for column in table.columns), style=style)
    console.print(shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One kind of sample in ``cell["samples"][name]``; ``scale`` turns a sample into ``unit``.

    ``decides``: a regression of it fails ``bench compare`` unless ``--metric`` names others.
    """

    name: str
    unit: str = ""
    scale: float = 1.0
    worse_is_higher: bool = True
    decides: bool = True
    better: str = "faster"  # the words of a verdict
    worse: str = "slower"
