"""Service level objectives: limits that one request must keep, and the goodput: requests that keep them all."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tightwire.bench.client import Sample

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Seconds that a request may take; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        limits = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def meets(self, sample: Sample) -> bool:
        """A failed request meets nothing, nor does one without text a limit of TTFT; one token has no TPOT to exceed."""
        if sample.error:
            return False
        taken = {"ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s or 0.0, "e2e_s": sample.e2e_s}
        return all(
            value is not None and value <= limit for name, limit in self.limits.items() for value in [taken[name]]
        )

    def goodput(self, samples: Sequence[Sample], seconds: float) -> dict[str, float | dict[str, float]]:
        """How many of the requests that were sent met all limits, their share, and how many a second."""
        met = sum(map(self.meets, samples))
        share = met / len(samples) if samples else 0.0
        return {"slo": self.limits, "met": met, "share": share, "requests_per_s": met / (seconds or math.inf)}


def parse_slo(text: str) -> Slo:
    """``ttft=500ms,tpot=50ms,e2e=10s``, any of the three.

    Raises:
        ValueError: another name, a name twice, or no duration.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, duration = (word.strip() for word in part.partition("="))
        found = _DURATION.fullmatch(duration)
        if name not in ("ttft", "tpot", "e2e") or name in limits or found is None or not float(found[1]):
            raise ValueError(
                f"--slo takes limits for ttft, tpot, e2e, such as ttft=500ms,tpot=50ms,e2e=10s, got {text!r}"
            )
        limits[name] = float(found[1]) / _PER_SECOND[found[2]]
    return Slo(**{f"{name}_s": limit for name, limit in limits.items()})
