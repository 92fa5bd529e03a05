"""``tightwire bench compare A.json B.json``: did B become worse than A?"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.compare import report
from tightwire.bench.compare.match import Row, check_alike, chosen_metrics, differences, faults, rows
from tightwire.bench.compare.options import CompareOptions, parse_options
from tightwire.bench.compare.results import KINDS, read_result
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.result_files import ResultFiles

SCHEMA = "tightwire.bench.compare/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 without a regression, 1 with one or where B failed, 2 for what cannot be compared, 130 after Ctrl-C."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        files = None if options.output is None else ResultFiles(options.output, options.label)
        result = compared(options)
        report.show(make_console(), result)
        if files is not None:
            report.keep(files, result)
    except ValueError as error:
        sys.stderr.write(f"tightwire bench compare: {error}\n")
        sys.stdout.write(json.dumps({"schema": SCHEMA, "cells": [], "error": str(error)}) + "\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(json.dumps({**result, "files": [] if files is None else files.paths}) + "\n")
    return 1 if result["regressions"] or result["faults"] else 0


def compared(options: CompareOptions) -> dict[str, Any]:
    """The whole comparison as plain data.

    Raises:
        ValueError: a file is no result, or the two have nothing in common.
    """
    a, b = read_result(options.a), read_result(options.b)
    check_alike(a, b)
    metrics = chosen_metrics(a.kind, options.metrics)
    found = rows(a, b, metrics)
    if not found:
        raise ValueError(f"no cell has {' or '.join(metric.name for metric in metrics)} in both results")
    cells = [_plain(row, options.tolerance, a.kind) for row in found]
    return {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "label": options.label,
        "kind": a.kind,
        "a": {"path": str(a.path), "label": a.raw.get("label")},
        "b": {"path": str(b.path), "label": b.raw.get("label")},
        "tolerance": options.tolerance,
        "deciding": [metric.name for metric in metrics if metric.decides],
        "differences": differences(a, b),
        "faults": faults(a, b, options.tolerance),
        "cells": cells,
        "regressions": sum(cell["regression"] for cell in cells),
        "error": None,
    }


def _plain(row: Row, tolerance: float, kind: str) -> dict[str, Any]:
    verdicts = {"faster": KINDS[kind].better, "slower": KINDS[kind].worse}
    comparison = asdict(row.comparison)
    return {
        "cell": row.cell,
        "metric": row.metric.name,
        "unit": row.metric.unit,
        "a": row.a * row.metric.scale,
        "b": row.b * row.metric.scale,
        "paired": row.paired,
        **comparison,
        "verdict": verdicts.get(row.comparison.verdict, row.comparison.verdict),
        "regression": row.metric.decides and row.regressed(tolerance),
    }
