"""How much accuracy may be lost, as the user says it: ``kl=0.01`` (nats, mean) or ``ppl=0.1%`` (of perplexity)."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FORM = re.compile(r"(kl)=([0-9.eE+-]+)|(ppl)=([0-9.eE+-]+)%")


@dataclass(frozen=True, slots=True)
class Budget:
    """``kind`` is ``kl`` (mean nats) or ``ppl`` (relative increase); ``limit`` in that unit."""

    text: str
    kind: str
    limit: float

    def allows(self, row: Mapping[str, Any]) -> bool:
        """Whether an arm that came to ``row`` at one world size is inside.

        Perplexity needs many tokens until luck evens out: the upper end of its interval has to be inside.
        """
        if self.kind == "kl":
            return row["kl_mean"] <= self.limit
        high = row["perplexity_delta_high"]
        return (row["perplexity_delta"] if high is None else high) <= self.limit


def parse_budget(text: str) -> Budget:
    """Raises ValueError with what is possible."""
    match = _FORM.fullmatch(text.strip())
    number = (match[2] or match[4]) if match else ""
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if match is None or not 0 <= limit < math.inf:
        raise ValueError(
            f"--budget {text!r} is no budget; write kl=0.01 (mean KL in nats, at most) or ppl=0.1% (increase of perplexity)"
        )
    return Budget(text, "kl", limit) if match[1] else Budget(text, "ppl", limit / 100)


def cheapest_inside(rows: Sequence[Mapping[str, Any]], budget: Budget) -> str | None:
    """The name of the arm that sends least among those inside at every world size in ``rows``; None: there is none.

    Of arms with equally many bytes, the one with the smaller KL.
    """
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    inside = [name for name in names if all(budget.allows(row) for row in rows if row["algorithm"] == name)]

    def cost(name: str) -> tuple[float, float]:
        own = [row for row in rows if row["algorithm"] == name]
        return sum(row["bytes_per_token"] for row in own), sum(row["kl_mean"] for row in own)

    return min(inside, key=cost, default=None)
