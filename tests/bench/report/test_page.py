"""The page around plots and tables: escaped text, commands in boxes, settings in words."""

from base64 import b64decode

import pytest

from tightwire.bench.report import page as page_module
from tightwire.bench.report.page import Text, describe_fact, render, split_command
from tightwire.bench.report.plot import Plot, lines, svg
from tightwire.bench.report.table import Column, Table

ROWS = [{"name": "first", "size": 1, "s": 2.0}, {"name": "first", "size": 10, "s": 4.0}]
PLOT: Plot = lines("Lines & points", ROWS, by="name", x=Column("x", "size", "d"), y=Column("y", "s", ".1f"))


def test_a_page_escapes_text_and_embeds_plots() -> None:
    table = Table(
        columns=[Column("<name>", "name"), Column("n", "n", "d")],
        rows=[{"name": "a & b", "n": 1}, {"name": "c", "n": None}],
        title="Table",
        note="w <b>",
        wrong=lambda row: row["n"] is None,
    )
    items = [PLOT, table, Text(title="T", lines=["one"])]
    page = render("swim", "<Title>", "lead", items, alarms=["alarm!"], facts={"k_s": "a 'b'", "none": None})

    assert "&lt;Title&gt;" in page and "w &lt;b&gt;" in page and "a &amp; b" in page and "alarm!" in page
    assert '<div class="scroll" tabindex="0" role="region" aria-label="Table">' in page  # keys scroll what is too wide
    assert '<tr class="wrong"><td class="word">c</td><td>-</td>' in page and "<td>1</td>" in page
    assert 'alt="Lines &amp; points"' in page and "one" in page and "<dt>k s</dt>" in page
    embedded = page.partition("base64,")[2].partition('"')[0]
    assert b64decode(embedded).decode() == svg(PLOT)
    assert "none" not in page.partition("<dl>")[2]


def test_commands_stand_in_boxes() -> None:
    text = Text(
        title="Recommended", lines=["lossless: tightwire serve --tp 2", "  why not", "one tightwire server is up"]
    )
    command = ["tightwire", "bench", "swim", "--label", "in $HOME"]
    page = render("swim", "t", "l", [text], alarms=[], facts={"command": command})

    assert "<p>lossless</p>\n<pre><code>tightwire serve --tp 2</code></pre>" in page
    assert "<pre><code>tightwire bench swim --label &#39;in $HOME&#39;</code></pre>" in page
    assert split_command("one tightwire server is up") == ("one tightwire server is up", "")


def test_settings_are_words_and_no_tuples() -> None:
    options = {"prompt_lens": (128, 512), "link": None, "overlap": True, "rate": 2.50, "inner": {"a": 1}}

    assert describe_fact(options) == "prompt lens 128, 512; overlap yes; rate 2.5"
    assert describe_fact([{"name": "a"}]) == ""


def test_the_page_says_that_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "has_matplotlib", lambda: False)
    page = render("swim", "t", "l", [PLOT], alarms=[], facts={})

    assert "Plots are missing: matplotlib is not installed: pip install matplotlib" in page and "<img" not in page
