"""Rows, faults and tables of ``bench train``: one row for each arm over each link."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tightwire.bench.report.page import Item
from tightwire.bench.report.plot import lines
from tightwire.bench.report.statistics import describe
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.train.measure import Checked, Timed, Wired, config_of_arm
from tightwire.bench.train.options import ARMS, TrainOptions
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import parse_link
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.estimate.step import StepModel, model_step
from tightwire.training.estimate.step_time import Computing, Rates, predict_step

# Relative loss difference after a few steps between arms that may sum in different orders; bfloat16 has 8 bits.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
_MOST_WIRE_ERROR = 0.02  # relative difference between the kernel's byte count and the formula
_MESSAGE_BYTES = 256  # gloo's own bytes per message
_BARRIER_MESSAGES = 16  # of clipping and the barriers around the step

_STEP = Column("step s", "seconds.p50", ".2f")
_WHERE = (Column("link", "link"), Column("sequences", "sequences", "d"), Column("arm", "arm"))
_STEP_COLUMNS = (
    *_WHERE,
    _STEP,
    Column("from", "seconds.min", ".2f"),
    Column("to", "seconds.max", ".2f"),
    Column("MB from a node", "node_payload_bytes", ".2f", 1e-6),
    Column("exposed s", "exposed_s", ".2f"),
    Column("computing s", "computing_s", ".2f"),
    Column("predicted s", "predicted_s", ".2f"),
    Column("error", "prediction_error", "+.0%"),
)
_CHECK_COLUMNS = (
    *_WHERE,
    Column("last loss", "losses", lambda losses: f"{losses[-1]:.6f}"),
    Column("loss error", "loss_error", lambda error: f"{error:.1e}" if error else "equal"),
    Column("peak MB", "peak_bytes", ".1f", 1e-6),
    Column("by formula", "formula_peak_bytes", ".1f", 1e-6),
    Column("bytes / formula", "payload_over_formula", ".3f"),
)
CSV_COLUMNS = (*_STEP_COLUMNS, *_CHECK_COLUMNS[len(_WHERE) :])
_STEP_WORDS = (
    "Medians of steps; a step is as long as on the slowest rank. Exposed: the step without its computing, which is the same "
    "step in the same process without messages. Predicted: from the formulas' bytes, computing without messages, the link's "
    "rate and latency as collectives of 1 MiB and 1 KiB measure them, and the engine's scheduling rules."
)
_DASHED = "Dashed: torch's own."
_CHECK_WORDS = (
    "From the first steps, in separate processes without a slow link. Exact arms must have the same losses up to rounding. "
    "Peak: the growth of resident memory while all freed memory returns to the system."
)


@dataclass(frozen=True)
class ArmModel:
    """The step of one of the engine's arms by formula, on each rank."""

    ranks: tuple[StepModel, ...]
    peak_bytes: int  # of a rank

    @property
    def node_bytes(self) -> int:
        """Bytes per step that leave the node that sends most."""
        between, per_node = [rank.between_nodes for rank in self.ranks], self.ranks[0].topology.ranks_per_node
        return max(sum(between[first : first + per_node]) for first in range(0, len(between), per_node))

    @property
    def busiest(self) -> StepModel:
        """The step of the rank that sends most to other nodes; the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.between_nodes)


def model_arms(options: TrainOptions, llama: LlamaConfig) -> dict[str, ArmModel]:
    """Raises ValueError: an arm does not fit these ranks; the message names it."""
    found, where = {}, Topology(0, options.world_size, num_nodes=options.nodes)
    for name in options.arms:
        if not ARMS[name].peer:
            first = model_step(*config_of_arm(options, name), llama, where)
            found[name] = ArmModel((first, *map(first.on_rank, range(1, options.world_size))), first.memory().most)
    return found


@dataclass(kw_only=True, slots=True)
class Checks:
    """The checked steps by arm, and the formulas of the engine's arms."""

    models: Mapping[str, ArmModel]
    dtype: str
    checked: dict[str, Checked] = field(default_factory=dict)

    def facts(self, arm: str) -> dict[str, Any]:
        own, model = self.checked[arm], self.models.get(arm)
        return {
            "losses": own.losses,
            "loss_error": self._loss_error(arm),
            "ledger_bytes": model and own.bytes_sent,
            "formula_bytes": model and [rank.bytes_sent for rank in model.ranks],
            "peak_bytes": own.peak_bytes,
            "formula_peak_bytes": model and model.peak_bytes,
        }

    def faults(self, arm: str) -> list[str]:
        """The failed checks that invalidate the arm."""
        facts, found = self.facts(arm), []
        if not all(map(math.isfinite, facts["losses"])):
            found.append(f"its losses are {facts['losses']}")
        if facts["ledger_bytes"] != facts["formula_bytes"]:
            found.append(f"ranks sent {facts['ledger_bytes']} bytes in a step, by formula {facts['formula_bytes']}")
        error, reference = facts["loss_error"], self._reference()
        if ARMS[arm].is_exact and reference and error is not None and error > _TOLERANCES[self.dtype]:
            found.append(f"its losses are {facts['losses']}, those of {reference} {self.checked[reference].losses}")
        return found

    def _reference(self) -> str | None:
        """The exact arm to compare losses with."""
        return next((arm for arm in self.checked if ARMS[arm].is_exact), None)

    def _loss_error(self, arm: str) -> float | None:
        """The largest relative loss difference to the reference; None if the optimizers differ."""
        reference = self._reference()
        if reference is None or ARMS[arm].optimizer != ARMS[reference].optimizer:
            return None
        pairs = zip(self.checked[arm].losses, self.checked[reference].losses, strict=True)
        return max(abs(mine - its) / abs(its) for mine, its in pairs)


@dataclass(kw_only=True, slots=True)
class LinkCells:
    """The results over one link so far."""

    link: str
    sequences: int  # of each rank in a step
    checks: Checks
    rates: Rates | None = None
    wired: dict[str, Wired] = field(default_factory=dict)
    steps: list[Timed] = field(default_factory=list)

    def add(self, event: Rates | Wired | Timed) -> None:
        if isinstance(event, Rates):
            self.rates = event
        elif isinstance(event, Wired):
            self.wired[event.arm] = event
        else:
            self.steps.append(event)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of every arm that has a step."""
        timed = {step.arm for step in self.steps if step.computing is None}
        return [self._row(arm, self.wired[arm]) for arm in self.checks.checked if arm in timed]

    def _row(self, arm: str, wired: Wired) -> dict[str, Any]:
        own = [step for step in self.steps if step.arm == arm]
        seconds, computing = (
            [step.step_s for step in own if (step.computing is not None) == alone] for alone in (False, True)
        )
        step_s, computing_s = median(seconds), median(computing) if computing else None
        model, predicted_s = self.checks.models.get(arm), None
        if model is not None and computing and self.rates is not None:
            parts = [median(values) for values in zip(*(step.computing for step in own if step.computing), strict=True)]
            predicted_s = predict_step(model.busiest, Computing(*parts), self.rates)
        return {
            "name": f"{arm}, {self.link}, {self.sequences} sequences",
            "link": self.link,
            "sequences": self.sequences,
            "link_bytes_per_s": parse_link(self.link).bytes_per_s,
            "arm": arm,
            "seconds": describe(seconds),
            "node_bytes": model and model.node_bytes,
            "node_payload_bytes": wired.payload_bytes,
            "payload_over_formula": wired.payload_bytes / model.node_bytes if model and model.node_bytes else None,
            "computing_s": computing_s,
            "exposed_s": None if computing_s is None else max(0.0, step_s - computing_s),
            "predicted_s": predicted_s,
            "prediction_error": None if predicted_s is None else predicted_s / step_s - 1,
            **self.checks.facts(arm),
            "samples": {"step_s": seconds, **({"computing_s": computing} if computing else {})},
            "faults": [*self.checks.faults(arm), *self._wire_faults(model, wired)],
        }

    def _wire_faults(self, model: ArmModel | None, wired: Wired) -> list[str]:
        if model is None:
            return []
        busiest = model.busiest
        messages = _BARRIER_MESSAGES + busiest.messages_between_nodes * busiest.topology.ranks_per_node
        error = abs(wired.payload_bytes - model.node_bytes)
        if error <= _MOST_WIRE_ERROR * model.node_bytes + messages * _MESSAGE_BYTES:
            return []
        return [f"its node sent {wired.payload_bytes} bytes of payload over {self.link}, by formula {model.node_bytes}"]


def fault_texts(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(f"{row['arm']}: {fault}" for row in rows for fault in row["faults"]))


def make_tables(rows: Sequence[Row]) -> list[Table]:
    tables = ("Steps", _STEP_COLUMNS, _STEP_WORDS), ("Checks", _CHECK_COLUMNS, _CHECK_WORDS)
    return [
        Table(title=title, columns=columns, rows=rows, wrong=lambda row: bool(row["faults"]), note=note)
        for title, columns, note in tables
    ]


def _is_peer(arm: str) -> bool:
    return ARMS[arm].peer is not None


def make_sections(rows: Sequence[Row]) -> list[Item]:
    """Step time by link for each number of sequences; with several, also by their number for each link."""
    by_link, by_sequences = Column("link between nodes, Mbit/s", "link_bytes_per_s", ",g", 8e-6), _WHERE[1]
    plots: list[Item] = []
    for x, title, key in ((by_link, "{} sequences a rank", "sequences"), (by_sequences, "{}", "link")):
        for value in dict.fromkeys(row[key] for row in rows):
            own = [row for row in rows if row[key] == value]
            if x is by_link or len({row["sequences"] for row in own}) > 1:
                title_of = f"Step time by {x.name}, {title.format(value)}"
                plots.append(lines(title_of, own, by="arm", x=x, y=_STEP, dashed=_is_peer, ticks=True, note=_DASHED))
    return [*plots, *make_tables(rows)]


def describe_setting(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['model']} ({facts['num_parameters'] / 1e6:.1f} M parameters), {facts['dtype']}; {facts['nodes']} nodes of "
        f"{facts['ranks_per_node']} rank{'s' * (facts['ranks_per_node'] > 1)}, one thread each; "
        f"{', '.join(map(str, facts['sequences']))} sequences of {facts['sequence_tokens']} tokens per rank and step"
    )


def describe_link(link: Mapping[str, Any]) -> str:
    found = [
        f"{1e-6 * link['rates'][f'{where}_bytes_per_s']:.2f} MB/s and {1e3 * link['rates'][f'{where}_round_s']:.1f} ms {where} nodes"
        for where in ("across", "inside")
        if math.isfinite(link["rates"][f"{where}_bytes_per_s"])  # nothing moves inside nodes of one rank
    ]
    rate = f"{link['name']}: {link['measured_bytes_per_s'] * 8 / 1e6:.0f} Mbit/s in a bulk transfer"
    return f"{rate}; collectives of a rank: {', '.join(found)}"
