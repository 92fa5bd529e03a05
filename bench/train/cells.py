"""Collects the ranks' reports over one link into cells: each arm's step, bytes, computing time and prediction."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from tightwire.bench.report.statistics import describe
from tightwire.bench.train.checks import Checks
from tightwire.bench.train.measure import Timed, Wired
from tightwire.bench.train.probes import Probed
from tightwire.training.estimate.step_time import Computing, Rates, predict_step

_MOST_WIRE_ERROR = 0.02  # relative difference between the kernel's byte count and the formula
_MESSAGE_BYTES = 256  # gloo's own bytes per message
_BARRIER_MESSAGES = 16  # of clipping and the barrier after the step


@dataclass(kw_only=True, slots=True)
class LinkCells:
    """The reports over one link. ``timed``: by (arm, detached), step number and rank."""

    link: str
    asked_bytes_per_s: float
    bytes_per_s: float  # of a bulk transfer
    world_size: int
    checks: Checks
    probed: dict[tuple[str, int], list[Probed]] = field(default_factory=dict)
    wired: dict[str, dict[int, Wired]] = field(default_factory=dict)
    timed: dict[tuple[str, bool], dict[int, dict[int, Timed]]] = field(default_factory=dict)

    def add(self, rank: int, event: Probed | Wired | Timed) -> None:
        if isinstance(event, Probed):
            self.probed.setdefault((event.where, event.num_bytes), []).append(event)
        elif isinstance(event, Wired):
            self.wired.setdefault(event.arm, {})[rank] = event
        else:
            steps = self.timed.setdefault((event.arm, event.detached), {})
            steps.setdefault(event.number, {})[rank] = event

    @property
    def num_timed(self) -> int:
        """The number of steps that ranks reported."""
        return sum(len(ranks) for steps in self.timed.values() for ranks in steps.values())

    def rates(self) -> Rates:
        return Rates(*self._rate_and_round("across"), *self._rate_and_round("inside"))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of every arm with a complete step on all ranks."""
        return [self._row(arm) for arm in self.checks.reports if self._steps(arm, detached=False) and arm in self.wired]

    def _rate_and_round(self, where: str) -> tuple[float, float]:
        small, large = sorted(num_bytes for at, num_bytes in self.probed if at == where)
        peers = self.probed[where, large][0].num_peers
        round_s, large_s = (max(report.seconds for report in self.probed[where, size]) for size in (small, large))
        if peers == 0:  # one rank per node
            return float("inf"), 0.0
        return peers * (large - small) / max(large_s - round_s, 1e-9), round_s

    def _steps(self, arm: str, *, detached: bool) -> list[list[Timed]]:
        """The steps that all ranks reported."""
        steps = self.timed.get((arm, detached), {}).values()
        return [list(ranks.values()) for ranks in steps if len(ranks) == self.world_size]

    def _row(self, arm: str) -> dict[str, Any]:
        steps, alone = self._steps(arm, detached=False), self._steps(arm, detached=True)
        seconds = [max(report.times.step_s for report in ranks) for ranks in steps]
        payload = max(report.payload_bytes for report in self.wired[arm].values())
        model = self.checks.models.get(arm)
        of_node = model and model.node_bytes
        computing = [max(report.times.step_s for report in ranks) for ranks in alone]
        computing_s = median(computing) if computing else None
        predicted_s = None
        if model is not None and alone:
            predicted_s = predict_step(model.busiest, _computing(alone), self.rates())
        step_s = median(seconds)
        bound_s = max((of_node or payload) / self.bytes_per_s, computing_s or 0.0)
        waited = [max(report.times.waited_s or 0.0 for report in ranks) for ranks in steps]
        row = {
            "name": f"{arm}, {self.link}",
            "link": self.link,
            "link_bytes_per_s": self.asked_bytes_per_s,
            "arm": arm,
            "seconds": asdict(describe(seconds)),  # pyright: ignore[reportArgumentType]
            "node_bytes": of_node,
            "node_payload_bytes": payload,
            "node_wire_bytes": max(report.wire_bytes for report in self.wired[arm].values()),
            "payload_over_formula": payload / of_node if of_node else None,
            "waited_s": median(waited) if model else None,
            "computing_s": computing_s,
            "exposed_s": None if computing_s is None else max(0.0, step_s - computing_s),
            "predicted_s": predicted_s,
            "prediction_error": None if predicted_s is None else predicted_s / step_s - 1,
            "bound_s": bound_s,
            "over_bound": step_s / bound_s,
            **self.checks.facts(arm),
            "samples": {"step_s": seconds, **({"computing_s": computing} if computing else {})},
        }
        return {**row, "faults": [*self.checks.faults(arm), *self._wire_faults(arm, payload)]}

    def _wire_faults(self, arm: str, payload: int) -> list[str]:
        model = self.checks.models.get(arm)
        if model is None:
            return []
        messages = _BARRIER_MESSAGES + model.busiest.messages_between_nodes * model.ranks_per_node
        if abs(payload - model.node_bytes) <= _MOST_WIRE_ERROR * model.node_bytes + messages * _MESSAGE_BYTES:
            return []
        return [f"its node sent {payload} bytes of payload over {self.link}, by formula {model.node_bytes}"]


def _computing(alone: Sequence[Sequence[Timed]]) -> Computing:
    """The parts of the median step: the mean over ranks, scaled to the slowest rank's step."""
    phases = []
    for ranks in alone:
        times = [report.times for report in ranks]
        stretch = max(each.step_s for each in times) / fmean(each.step_s for each in times)
        phases.append(
            tuple(
                stretch * fmean(getattr(each, phase) for each in times)
                for phase in ("forward_s", "backward_s", "rest_s")
            )
        )
    return Computing(*(median(values) for values in zip(*phases, strict=True)))


def fault_texts(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Every fault once, with its arm."""
    return list(dict.fromkeys(f"{row['arm']}: {fault}" for row in rows for fault in row["faults"]))
