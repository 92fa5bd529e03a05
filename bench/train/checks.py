"""Checks each arm's losses against a reference arm, and its bytes against the formula."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.measure import Checked
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.trainee import config_of_arm
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.estimate.step import StepModel, model_step

# Relative loss difference after a few steps between arms that sum in different orders; bfloat16 has 8 bits.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class ArmModel:
    """The step of one of the engine's arms by formula, on each rank."""

    ranks: tuple[StepModel, ...]

    @property
    def ranks_per_node(self) -> int:
        return self.ranks[0].topology.ranks_per_node

    @cached_property
    def memory_bytes(self) -> int:
        return self.ranks[0].memory().most

    @cached_property
    def node_bytes(self) -> int:
        """Bytes per step that leave the node that sends most."""
        between = [rank.between_nodes for rank in self.ranks]
        per_node = self.ranks_per_node
        return max(sum(between[first : first + per_node]) for first in range(0, len(between), per_node))

    @cached_property
    def busiest(self) -> StepModel:
        """The step of the rank that sends most to other nodes; the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.between_nodes)


def model_arms(options: TrainBenchOptions, llama: LlamaConfig) -> dict[str, ArmModel]:
    """
    Raises:
        ValueError: an arm does not fit these ranks; the message names it.
    """
    found = {}
    for name in options.arms:
        if not ARMS[name].peer:
            config, how = config_of_arm(options, ARMS[name])
            first = model_step(config, how, llama, Topology(0, options.world_size, num_nodes=options.nodes))
            found[name] = ArmModel((first, *map(first.on_rank, range(1, options.world_size))))
    return found


@dataclass(kw_only=True, slots=True)
class Checks:
    """The checked steps, by arm and rank. ``models``: by arm."""

    models: Mapping[str, ArmModel]
    dtype: str
    reports: dict[str, dict[int, Checked]] = field(default_factory=dict)

    def add(self, rank: int, checked: Checked) -> None:
        self.reports.setdefault(checked.arm, {})[rank] = checked

    def facts(self, arm: str) -> dict[str, Any]:
        """The check results for the rows of one arm."""
        ranks, model = self.reports[arm], self.models.get(arm)
        return {
            "losses": self._losses(arm),
            "loss_error": self._loss_error(arm),
            "ledger_bytes": model and [ranks[rank].bytes_sent for rank in sorted(ranks)],
            "formula_bytes": model and [model.ranks[rank].bytes_sent for rank in sorted(ranks)],
            "peak_bytes": _most(report.peak_bytes for report in ranks.values()),
            "formula_peak_bytes": model and model.memory_bytes,
            "resident_bytes": _most(report.resident_bytes for report in ranks.values()),
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
            found.append(f"its losses are {facts['losses']}, those of {reference} {self._losses(reference)}")
        return found

    def _losses(self, arm: str) -> list[float]:
        """The mean loss over ranks of each step."""
        ranks = self.reports[arm].values()
        return [math.fsum(losses) / len(ranks) for losses in zip(*(rank.losses for rank in ranks), strict=True)]

    def _reference(self) -> str | None:
        """The arm to compare losses with: the first exact one, preferably one that sums rank by rank."""
        exact = [arm for arm in self.reports if ARMS[arm].adds is not None]
        return min(exact, key=lambda arm: ARMS[arm].adds != "ranks", default=None)

    def _loss_error(self, arm: str) -> float | None:
        """The largest relative loss difference to the reference; None if the optimizers differ."""
        reference = self._reference()
        if reference is None or ARMS[arm].optimizer != ARMS[reference].optimizer:
            return None
        pairs = zip(self._losses(arm), self._losses(reference), strict=True)
        return max(abs(mine - its) / abs(its) for mine, its in pairs)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
