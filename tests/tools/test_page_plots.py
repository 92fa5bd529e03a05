"""The pictures of the pages are drawn from the tables that the pages show."""

import re

import page_plots
import pytest

pytest.importorskip("matplotlib")


def _words(text: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", text)


def test_a_picture_has_the_series_and_the_points_of_its_table() -> None:
    for path, text in page_plots.plots():
        before = path.read_text()
        assert sorted(_words(before)) == sorted(_words(text)), f"{path.name}: run python tools/page_plots.py"
        assert before.count("<use ") == text.count("<use "), f"{path.name}: run python tools/page_plots.py"


def test_a_table_is_read_by_the_name_of_its_first_column() -> None:
    page = "| a |\n|---|\n| 1 |\n\n| name | b |\n|---|--:|\n| x | 2 |\n| y | 3 |\n\ntext | more\n"
    assert page_plots.read_table(page, "name") == [{"name": "x", "b": "2"}, {"name": "y", "b": "3"}]
