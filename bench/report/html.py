"""Renders the HTML page of a result: one file without network access, in light and dark, for screen, phone and print."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment
from markupsafe import Markup

from tightwire.bench.report.table import Table, TableView


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading, then the parts that are given: words, a plot (``plots.draw``), a table."""

    title: str
    words: Sequence[str] = ()
    svg: str = ""
    table: Table | TableView | None = None
    wide: bool = False  # as wide as the page; other sections may stand side by side


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section]
    alarms: Sequence[str] = ()  # reasons not to trust the results
    facts: Sequence[tuple[str, str]] = ()  # shown at the end: machine, versions, settings


def render(page: Page) -> str:
    """The page as one HTML document."""
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(_TEMPLATE)
        .render(page=page, style=Markup(_STYLE), svg=Markup)
    )


_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #1c2024; --soft: #5b6470; --grid: #dfe3e8; --mark: #eef4ff;
  --bad: #b42318; --c0: #6b7280; --c1: #0b63c5; --c2: #0e8a63; --c3: #b45309; --c4: #7c3aed; --c5: #c0262d; --c6: #0891b2;
  --c7: #a21caf; --c8: #4d7c0f; --c9: #be185d; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e8eaed; --soft: #a0a9b4; --grid: #343a41;
  --mark: #1d2a3d; --bad: #ff8a80; --c0: #a9b1bb; --c1: #6cb0ff; --c2: #4fd6a5; --c3: #f5b05c; --c4: #bda0ff; --c5: #ff8d8d;
  --c6: #58d3ea; --c7: #ee93f5; --c8: #b5dd6a; --c9: #ff9ac4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0 .75rem; } .lead, .note, dt { color: var(--soft); }
.alarm { color: var(--bad); font-weight: 600; }
main { display: grid; gap: 2rem 2.5rem; margin-top: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
section { min-width: 0; } section.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; font-family: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
.word { text-align: left; }
tr.strong { background: var(--mark); font-weight: 600; } tr.wrong td { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; font-size: .875rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media print { @page { margin: 1.5cm; } :root { color-scheme: light; --paper: #fff; --ink: #000; --grid: #ccc; --mark: #eee; }
  body { max-width: none; padding: 0; font-size: 10pt; } main { display: block; } section { margin-bottom: 1.5rem; }
  section:not(.wide), tr, svg { break-inside: avoid; } h2 { break-after: avoid; } .scroll { overflow: visible; }
  table { font-size: 7.5pt; } th, td { white-space: normal; padding: .2rem .3rem; } svg { max-width: 12cm; } }
"""

_TEMPLATE = """{% macro word(is_word) %}{% if is_word %} class="word"{% endif %}{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
<p class="lead">{{ page.lead }}</p>
{% for alarm in page.alarms %}
<p class="alarm">{{ alarm }}</p>
{% endfor %}
</header>
<main>
{% for section in page.sections %}
<section{% if section.wide %} class="wide"{% endif %}>
<h2>{{ section.title }}</h2>
{% for words in section.words %}
<p class="note">{{ words }}</p>
{% endfor %}
{{ svg(section.svg) }}
{% if section.table %}
{% set table = section.table.view() %}
<div class="scroll"><table>
<thead><tr>
{%- for name in table.columns %}<th{{ word(table.is_word(loop.index0)) }}>{{ name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
{% set number = loop.index0 %}
<tr{% if number in table.wrong %} class="wrong"{% elif number in table.strong %} class="strong"{% endif %}>
{%- for cell in row %}<td{{ word(table.is_word(loop.index0)) }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
</section>
{% endfor %}
{% if page.facts %}
<section class="wide">
<h2>Where and how</h2>
<dl>
{% for name, value in page.facts %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
</section>
{% endif %}
</main>
</body>
</html>
"""
