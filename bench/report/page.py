"""The HTML page of a result: plots, tables and text in one file that needs no network, in the look of the playground."""

import re
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment

from tightwire.bench import report
from tightwire.bench.report.plot import NO_PLOTS, Plot, has_matplotlib, style_sheet, svg
from tightwire.bench.report.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Lines of text; one that begins with "tightwire ", also after a colon, is a command, which a page shows in a box."""

    title: str
    lines: Sequence[str]


Item = Plot | Table | Text


def render(
    name: str, title: str, lead: str, items: Sequence[Item], *, alarms: Sequence[str], facts: Mapping[str, object]
) -> str:
    """The page of the bench ``name``. ``alarms``: reasons not to trust the result; ``facts``: machine, versions, settings."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"command": split_command, "fact": describe_fact, "shell": shlex.join}
    template = environment.from_string((files(report) / "page.html").read_text())
    plots = [item for item in items if isinstance(item, Plot)]
    return template.render(
        name=name,
        title=title,
        lead=lead,
        style=style_sheet(),
        texts=[item for item in items if isinstance(item, Text)],
        plots=[(plot, b64encode(svg(plot).encode()).decode()) for plot in plots if has_matplotlib()],
        missing=NO_PLOTS if plots and not has_matplotlib() else "",
        tables=[item for item in items if isinstance(item, Table)],
        alarms=alarms,
        facts={key.replace("_", " "): value for key, value in facts.items() if describe_fact(value)},
    )


def split_command(line: str) -> tuple[str, str]:
    """The words before a command line of Tightwire's, and the command, empty if there is none."""
    found = re.fullmatch(r"(?:(.*): )?(tightwire .*)", line)
    return (found[1] or "", found[2]) if found else (line, "")


def describe_fact(value: object) -> str:
    """A value of a result in words; empty for nothing, and for values with values inside their values."""
    if isinstance(value, Mapping):
        inner = {key: describe_fact(part) for key, part in value.items() if not isinstance(part, Mapping)}
        return "; ".join(f"{str(key).replace('_', ' ')} {text}" for key, text in inner.items() if text)
    if isinstance(value, (list, tuple)):
        return "" if any(isinstance(part, (Mapping, list, tuple)) for part in value) else ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
