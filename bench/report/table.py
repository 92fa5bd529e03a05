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
_MOST_WORD_CHARS = 28  # of a word that is not folded where room is scarce


@dataclass(frozen=True, slots=True)
class Column:
    """One value of each row.

    ``key`` is a path into the row, such as ``seconds.p50``, and the heading in CSV files. ``format`` is a function of the
    value, or a format spec for ``scale * value``. A column without a format holds words and is aligned left. A missing
    value is shown as ``-``. A ``detail`` is left out first where a terminal is too narrow for the table.
    """

    name: str
    key: str
    format: str | Callable[[Any], str] = ""
    scale: float = 1.0
    detail: bool = False

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

    @property
    def filled(self) -> list[Column]:
        """The columns with a value in any row, to be shown."""
        return [column for column in self.columns if any(column.value(row) is not None for row in self.rows)]

    def csv(self) -> str:
        """Raw values under their keys; None is an empty cell."""
        text = StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([column.key for column in self.columns])
        writer.writerows([column.value(row) for column in self.columns] for row in self.rows)
        return text.getvalue()


def print_table(console: Console, table: Table) -> None:
    """Print the columns that fit with all their digits; a line below names those that do not."""
    shown, left_out = _fitting(table, console.width)
    title = escape(table.title) or None
    printed = RichTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in shown:
        least = max(map(len, column.name.split()), default=1)
        if not column.is_word:
            least = max([least, *(len(column.text(row)) for row in table.rows)])
        justify = "left" if column.is_word else "right"
        printed.add_column(escape(column.name), justify=justify, overflow="fold", min_width=least)
    for row in table.rows:
        style = "red" if table.wrong(row) else None
        printed.add_row(*(escape(column.text(row)) for column in shown), style=style)
    console.print(printed)
    if left_out:
        names = ", ".join(column.name for column in left_out)
        console.print(f"not in {console.width} columns: {names}", style="dim", markup=False, soft_wrap=True)


def _fitting(table: Table, width: int) -> tuple[list[Column], list[Column]]:
    """The columns that fit into ``width`` characters, and those that do not: ``detail`` ones first, from the right."""

    def taken(column: Column) -> int:
        cells = [len(column.text(row)) for row in table.rows]
        longest = min(_MOST_WORD_CHARS, max(cells, default=0)) if column.is_word else max(cells, default=0)
        return 2 + max([longest, *map(len, column.name.split())])

    shown, left_out = table.filled, []
    while len(shown) > 1 and 2 + sum(map(taken, shown)) > width:
        least = max(range(1, len(shown)), key=lambda number: (shown[number].detail, number))
        left_out.insert(0, shown.pop(least))
    return shown, left_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One kind of sample in ``cell["samples"][name]``; ``scale`` turns a sample into ``unit``."""

    name: str
    unit: str = ""
    scale: float = 1.0
    worse_is_higher: bool = True
    decides: bool = True  # a regression of it fails ``bench compare`` unless ``--metric`` names others
    better: str = "faster"  # the words of a verdict
    worse: str = "slower"
