"""Turns the ranks' reports over one link into rows: each arm's step, bytes, computing time and prediction."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from tightwire.bench.report.statistics import describe
from tightwire.bench.train.checks import Checks
from tightwire.bench.train.measure import Timed, Wired
from tightwire.bench.train.predict import Computing, Rates, predict_step
from tightwire.bench.train.probe import Probed

MOST_WIRE_ERROR = 0.02  # relative difference between the kernel's byte count and the formula
_MESSAGE_BYTES = 256  # gloo's own bytes per message
_BARRIER_MESSAGES = 16  # of clipping and the barrier after the step
MOST_PREDICTION_ERROR = 0.15


@dataclass(kw_only=True, slots=True)
class LinkCells:
    """The reports over one link. ``told``: by (arm, detached), step number and rank."""

    link: str
    bytes_per_s: float  # of a bulk transfer
    num_nodes: int
    world_size: int
    checks: Checks
    probed: dict[tuple[str, int], list[Probed]] = field(default_factory=dict)
    wired: dict[str, dict[int, Wired]] = field(default_factory=dict)
    told: dict[tuple[str, bool], dict[int, dict[int, Timed]]] = field(default_factory=dict)

    def add(self, rank: int, event: Probed | Wired | Timed) -> None:
        if isinstance(event, Probed):
            self.probed.setdefault((event.where, event.num_bytes), []).append(event)
        elif isinstance(event, Wired):
            self.wired.setdefault(event.arm, {})[rank] = event
        else:
            steps = self.told.setdefault((event.arm, event.detached), {})
            steps.setdefault(event.number, {})[rank] = event

    @property
    def num_timed(self) -> int:
        """The number of steps that ranks reported."""
        return sum(len(ranks) for steps in self.told.values() for ranks in steps.values())

    def rates(self) -> Rates:
        return Rates(*self._rate_and_round("across"), *self._rate_and_round("inside"))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of every arm with a complete step on all ranks."""
        return [self._row(arm) for arm in self.checks.told if self._steps(arm, detached=False) and arm in self.wired]

    def _rate_and_round(self, where: str) -> tuple[float, float]:
        small, large = sorted(num_bytes for at, num_bytes in self.probed if at == where)
        others = self.probed[where, large][0].others
        round_s, large_s = (max(told.seconds for told in self.probed[where, size]) for size in (small, large))
        if others == 0:  # one rank per node
            return float("inf"), 0.0
        return others * (large - small) / max(large_s - round_s, 1e-9), round_s

    def _steps(self, arm: str, *, detached: bool) -> list[list[Timed]]:
        """The steps that all ranks reported."""
        steps = self.told.get((arm, detached), {}).values()
        return [list(ranks.values()) for ranks in steps if len(ranks) == self.world_size]

    def _row(self, arm: str) -> dict[str, Any]:
        steps, alone = self._steps(arm, detached=False), self._steps(arm, detached=True)
        seconds = [max(told.times.step_s for told in ranks) for ranks in steps]
        payload = max(told.payload_bytes for told in self.wired[arm].values())
        formulas = self.checks.formulas.get(arm)
        of_node = formulas and formulas.node_bytes
        computing_s = median(max(told.times.step_s for told in ranks) for ranks in alone) if alone else None
        predicted_s = None
        if formulas is not None and alone:
            traffic = formulas.busiest
            computing = _computing(alone)
            predicted_s = predict_step(
                traffic.plan, formulas.options, traffic.flows, traffic.slots, computing, self.rates()
            )
        step_s = median(seconds)
        bound_s = max((of_node or payload) / self.bytes_per_s, computing_s or 0.0)
        waited = [max(told.times.waited_s or 0.0 for told in ranks) for ranks in steps]
        row = {
            "link": self.link,
            "arm": arm,
            "seconds": asdict(describe(seconds)),  # pyright: ignore[reportArgumentType]
            "node_bytes": of_node,
            "node_payload_bytes": payload,
            "node_wire_bytes": max(told.wire_bytes for told in self.wired[arm].values()),
            "payload_over_formula": payload / of_node if of_node else None,
            "waited_s": median(waited) if formulas else None,
            "computing_s": computing_s,
            "exposed_s": None if computing_s is None else max(0.0, step_s - computing_s),
            "predicted_s": predicted_s,
            "prediction_error": None if predicted_s is None else predicted_s / step_s - 1,
            "bound_s": bound_s,
            "over_bound": step_s / bound_s,
            **self.checks.facts(arm),
            "samples_s": {"step": seconds, "detached": [max(t.times.step_s for t in ranks) for ranks in alone]},
        }
        return {**row, "faults": [*self.checks.faults(arm), *self._wire_faults(arm, payload)]}

    def _wire_faults(self, arm: str, payload: int) -> list[str]:
        if arm not in self.checks.formulas:
            return []
        formulas = self.checks.formulas[arm]
        formula = formulas.node_bytes
        messages = _BARRIER_MESSAGES + formulas.busiest.messages_between(self.num_nodes) * formulas.ranks_per_node
        if abs(payload - formula) <= MOST_WIRE_ERROR * formula + messages * _MESSAGE_BYTES:
            return []
        return [f"its node sent {payload} bytes of payload over {self.link}, by formula {formula}"]


def _computing(alone: Sequence[Sequence[Timed]]) -> Computing:
    """The parts of the median step: the mean over ranks, scaled to the slowest rank's step."""
    parts = []
    for ranks in alone:
        times = [told.times for told in ranks]
        stretch = max(each.step_s for each in times) / fmean(each.step_s for each in times)
        parts.append(
            tuple(
                stretch * fmean(getattr(each, part) for each in times) for part in ("forward_s", "backward_s", "rest_s")
            )
        )
    return Computing(*(median(values) for values in zip(*parts, strict=True)))


def fault_texts(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Every fault once, with its arm."""
    return list(dict.fromkeys(f"{row['arm']}: {fault}" for row in rows for fault in row["faults"]))
