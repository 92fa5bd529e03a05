"""The options of ``tightwire bench compare``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tightwire.bench.options import OutputOptions
from tightwire.option import REQUIRED, option

_DESCRIPTION = """Compare two results of one bench: for every cell the ratio B / A of medians, its bootstrap 95 % interval
from the raw samples, and a verdict. Exit code 0: no regression; 1: a deciding metric is worse and its whole interval is
beyond the tolerance, or requests failed in B that did not fail in A; 2: the files cannot be compared. Requests that were
in flight together count as one sample, and so do consecutive calls of a long series. An interval covers the noise inside
each run, not the drift of the machine between two runs: repeat both before you believe a small difference. For bench ttft
the ratio to the baseline decides, because the drift cancels in it."""


def _parse_share(text: str) -> float:
    number, percent = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) * percent
    except ValueError:
        raise ValueError(f"expected a share such as 5% or 0.05, got {text!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions(OutputOptions):
    description: ClassVar[str] = _DESCRIPTION
    a: Path = option(REQUIRED, "the result to compare with", flag="a", metavar="A.json")
    b: Path = option(REQUIRED, "the other result of the same bench", flag="b", metavar="B.json")
    tolerance: float = option(0.05, "accepted slowdown, such as 5%", metavar="T", parse=_parse_share, least=0)
    metrics: tuple[str, ...] = option(
        (),
        "compare only these metrics, and let each of them decide (default: all; the bench says which decide)",
        flag="--metric",
    )
