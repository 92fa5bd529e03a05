"""The command line of ``tightwire bench compare``."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import add_flags


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    a: Path
    b: Path
    tolerance: float = 0.05  # share of A's value
    metrics: tuple[str, ...] = ()  # (): all, and the bench's own decide
    output: Path | None = None
    label: str = "compare"

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"--tolerance must be at least 0, got {self.tolerance:g}")
        check_label(self.label)


def parse_options(argv: Sequence[str]) -> CompareOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = argparse.ArgumentParser(
        prog="tightwire bench compare",
        description="Compare two results of one bench: for every cell the ratio B / A of medians, its bootstrap 95 % "
        "interval from the raw samples, and a verdict. Exit status 0: no regression; 1: a metric that decides is worse, and "
        "its whole interval is beyond the tolerance, or requests failed in B that did not in A; 2: the files cannot be "
        "compared. The last line of stdout is one JSON object. Requests that were in flight together count as one sample, "
        "and of many others so do neighbours. An interval knows the noise inside each run, not how the machine drifts "
        "between two: run both again before believing a small difference. Of bench ttft the ratio to the baseline decides, "
        "in which that drift cancels.",
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A.json", help="what B is compared with")
    add("b", type=Path, metavar="B.json", help="the other result of the same bench")
    add("--tolerance", type=_share, default=0.05, metavar="T", help="how much worse is still good, such as 5%% (5%%)")
    add("--metric", metavar="NAME,NAME", help="compare these alone, and all of them decide (the bench's own)")
    add_flags(parser, "compare", "JSON, CSV and an HTML page")
    given = parser.parse_args(argv)
    try:
        return CompareOptions(
            a=given.a,
            b=given.b,
            tolerance=given.tolerance,
            metrics=() if given.metric is None else tuple(given.metric.split(",")),
            output=given.output,
            label=given.label,
        )
    except ValueError as error:
        parser.error(str(error))


def _share(text: str) -> float:
    number, percent = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) * percent
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, got {text!r}") from None
