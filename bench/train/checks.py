"""Checks each arm's losses against a reference arm and its bytes against the formula."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.formulas import Formulas
from tightwire.bench.train.measure import Checked

# Relative loss difference after a few steps between arms that sum in different orders; bfloat16 has 8 bits.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(kw_only=True, slots=True)
class Checks:
    """The checked steps, by arm and rank."""

    formulas: Mapping[str, Formulas]
    dtype: str
    told: dict[str, dict[int, Checked]] = field(default_factory=dict)

    def add(self, rank: int, checked: Checked) -> None:
        self.told.setdefault(checked.arm, {})[rank] = checked

    def losses(self, arm: str) -> list[float]:
        """The mean loss over ranks of each step."""
        ranks = self.told[arm].values()
        return [math.fsum(losses) / len(ranks) for losses in zip(*(told.losses for told in ranks), strict=True)]

    def facts(self, arm: str) -> dict[str, Any]:
        """The check results for the rows of one arm."""
        ranks, formulas = self.told[arm], self.formulas.get(arm)
        peaks = [told.peak_bytes for told in ranks.values() if told.peak_bytes is not None]
        grown = [told.resident_bytes for told in ranks.values() if told.resident_bytes is not None]
        return {
            "losses": self.losses(arm),
            "loss_error": self._loss_error(arm),
            "ledger_bytes": formulas and [ranks[rank].bytes_sent for rank in sorted(ranks)],
            "formula_bytes": formulas and [formulas.traffics[rank].bytes_sent for rank in sorted(ranks)],
            "peak_bytes": max(peaks) if peaks else None,
            "formula_peak_bytes": formulas and formulas.memory_bytes,
            "resident_bytes": max(grown) if grown else None,
        }

    def faults(self, arm: str) -> list[str]:
        """The failed checks that invalidate the arm."""
        facts, found = self.facts(arm), []
        if not all(map(math.isfinite, facts["losses"])):
            found.append(f"its losses are {facts['losses']}")
        if facts["ledger_bytes"] != facts["formula_bytes"]:
            found.append(f"ranks sent {facts['ledger_bytes']} bytes in a step, by formula {facts['formula_bytes']}")
        adds, error = ARMS[arm].adds, facts["loss_error"]
        reference = self._reference()
        if adds is None or error is None or reference is None:
            return found
        is_same_sum = adds == "ranks" and ARMS[reference].adds == "ranks"
        if error > (0.0 if is_same_sum else _TOLERANCES[self.dtype]):
            found.append(f"its losses are {facts['losses']}, those of {reference} {self.losses(reference)}")
        return found

    def _reference(self) -> str | None:
        """The arm to compare losses with: the first exact one, preferably one that sums rank by rank."""
        exact = [arm for arm in self.told if ARMS[arm].adds is not None]
        return min(exact, key=lambda arm: ARMS[arm].adds != "ranks", default=None)

    def _loss_error(self, arm: str) -> float | None:
        """The largest relative loss difference to the reference; None if the optimizers differ."""
        reference = self._reference()
        if reference is None or ARMS[arm].optimizer != ARMS[reference].optimizer:
            return None
        pairs = zip(self.losses(arm), self.losses(reference), strict=True)
        return max(abs(mine - its) / abs(its) for mine, its in pairs)
