"""What stands between nodes in training, over a wire that is really slow: time and bytes for one flat of gradients.

    sudo python bench/scripts/gradient_slot.py [--links 50mbit,200mbit,1gbit] [--elems 4194304] [--nodes 2] [--rounds 5]
                                            [--slots dense,quantized,dgc,...]

Each node is a process in a network namespace of its own; the kernel limits what passes between them (tc tbf), and gloo
carries it. A slot sums one float32 flat that is a single parameter, the same normal numbers each time, so a sparse slot
sends (1 - sparsity) of it. For every link and slot:

    predicted = bytes that a rank sends / rate that a bulk TCP transfer reaches on this wire + computing alone

where computing alone is the same slot on all ranks at once over a transport that hands every message back at no cost:
finding the largest numbers, encoding, adding. "On the wire" is what the kernel counted at the interface over the slot's own
bytes, which must be its formula's. Slots take turns in random order; the median of the rounds counts, of the slowest rank.
Prints Markdown; the last line is one JSON object. Exit code 1: a link that this machine cannot carry (the others are
measured), unlike results on two ranks, or bytes that are not the formula's.
"""

import argparse
import hashlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from link_table import finish, link_text, measure_links, show_row
from torch import Tensor

from tightwire.bench.comm.options import CommBenchOptions
from tightwire.bench.comm.ranks import open_ranks
from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.group.group import Group
from tightwire.comm.link.emulated_network import interface_bytes
from tightwire.comm.link.link import parse_link
from tightwire.comm.transport.weightless import WeightlessTransport
from tightwire.training.between.make import make_between
from tightwire.training.between.replicas import Replicas
from tightwire.training.config.between import BetweenOptions, DenseOptions, DgcOptions, QuantizedOptions, TopKOptions
from tightwire.training.engine.between import Between
from tightwire.training.engine.units import Flat, Part, cut

SLOTS: dict[str, BetweenOptions] = {
    "dense": DenseOptions(),
    "quantized": QuantizedOptions(),
    "quantized-int8": QuantizedOptions(reduce_codec="int8", gather_codec="int8"),
    "dgc": DgcOptions(),
    "dgc-float16": DgcOptions(value_type="float16"),
    "dgc-99": DgcOptions(sparsity=(0.99,)),
    "top-k-99": TopKOptions(sparsity=(0.99,)),
}
_BASELINE = "dense"
_UNIT = "flat"
_SETTLE_S = 0.1
_WARM_UPS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    slots: tuple[str, ...]
    num_elems: int
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One slot on one rank."""

    slot: str
    bytes_sent: int
    formula_bytes: int
    wire_over_counted: float
    digest: str  # of the first result
    seconds: list[float]
    computing_s: list[float]


def measure(group: Group, plan: Plan) -> Iterator[Measured]:
    """Runs on every rank."""
    part = Part("w", (1, plan.num_elems), 0, plan.num_elems)
    units = {_UNIT: cut(Flat(_UNIT, (part,), plan.num_elems, trainable=True), 0, 1)}
    alone = replace(group, transport=WeightlessTransport(group.rank, group.world_size))
    source = torch.Generator().manual_seed(group.rank)
    gradient_N = torch.randn(plan.num_elems, generator=source)
    order = random.Random(0)  # the same on all ranks
    slots = {name: make_between(SLOTS[name], Replicas(group=group, units=units)) for name in plan.slots}
    checked = {name: _check(group, slot, gradient_N) for name, slot in slots.items()}
    computing = {name: make_between(SLOTS[name], Replicas(group=alone, units=units)) for name in plan.slots}
    seconds = _in_turns(group, slots, gradient_N, plan, order)
    computing_s = _in_turns(group, computing, gradient_N, plan, order)
    for name, (sent, formula, share, digest) in checked.items():
        yield Measured(
            slot=name,
            bytes_sent=sent,
            formula_bytes=formula,
            wire_over_counted=share,
            digest=digest,
            seconds=seconds[name],
            computing_s=computing_s[name],
        )


def _check(group: Group, slot: Between, gradient_N: Tensor) -> tuple[int, int, float, str]:
    """Bytes of one call, counted and by formula; what the interface sent over them; a digest of the result."""
    group.transport.barrier()
    time.sleep(_SETTLE_S)  # for the barrier's own last packets
    formula, counted_before, sent_before = slot.wire_bytes(_UNIT), group.bytes_sent, interface_bytes()
    result = slot(_UNIT, gradient_N.clone())
    slot.step_done()
    time.sleep(_SETTLE_S)
    counted = group.bytes_sent - counted_before
    digest = hashlib.blake2b(result.numpy().data, digest_size=16).hexdigest()
    return counted, formula, (interface_bytes() - sent_before) / counted, digest


def _in_turns(
    group: Group, slots: dict[str, Between], gradient_N: Tensor, plan: Plan, order: random.Random
) -> dict[str, list[float]]:
    """Seconds of each call, by slot; all ranks begin each call together."""
    seconds: dict[str, list[float]] = {name: [] for name in slots}
    for number in range(_WARM_UPS + plan.rounds):
        names = list(slots)
        order.shuffle(names)
        for name in names:
            given_N = gradient_N.clone()
            group.transport.barrier()
            start = time.perf_counter()
            slots[name](_UNIT, given_N)
            taken = time.perf_counter() - start
            slots[name].step_done()
            if number >= _WARM_UPS:
                seconds[name].append(taken)
    return seconds


def run_link(name: str, plan: Plan, nodes: int) -> dict[str, Any]:
    """One wire: its measured rate, and a row for each slot."""
    options = CommBenchOptions(ranks=nodes, link=parse_link(name))
    by_slot: dict[str, list[Measured]] = {slot: [] for slot in plan.slots}
    with open_ranks(options) as (processes, facts):
        rate = facts["link"]["measured_bytes_per_s"]
        if rate is None:
            raise SystemExit(f"a real wire is needed: {facts['link']['why']}")
        watch = OthersWatch(processes.pids)
        for _, measured in processes.stream(measure, plan):
            by_slot[measured.slot].append(measured)
        others_share = watch.share()
    return {
        "link": name,
        "measured_bytes_per_s": rate,
        "others_share": others_share,
        "rows": [_row(slot, ranks, rate) for slot, ranks in by_slot.items()],
        "faults": [fault for slot, ranks in by_slot.items() for fault in _faults(slot, ranks)],
    }


def _row(slot: str, ranks: list[Measured], rate: float) -> dict[str, Any]:
    sent = max(measured.bytes_sent for measured in ranks)
    computing_s = _slowest(ranks, lambda measured: measured.computing_s)
    measured_s = _slowest(ranks, lambda measured: measured.seconds)
    predicted_s = sent / rate + computing_s
    return {
        "slot": slot,
        "bytes": sent,
        "wire_over_counted": max(measured.wire_over_counted for measured in ranks),
        "computing_s": computing_s,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "measured_over_predicted": measured_s / predicted_s,
    }


def _slowest(ranks: list[Measured], seconds: Callable[[Measured], list[float]]) -> float:
    """The median over the rounds of the slowest rank's time."""
    return statistics.median(max(of_ranks) for of_ranks in zip(*map(seconds, ranks), strict=True))


def _faults(slot: str, ranks: list[Measured]) -> list[str]:
    faults = []
    if len({measured.digest for measured in ranks}) > 1:
        faults.append(f"{slot}: ranks got unlike results")
    for rank, measured in enumerate(ranks):
        if measured.bytes_sent != measured.formula_bytes:
            faults.append(f"{slot}: rank {rank} sent {measured.bytes_sent} bytes, by formula {measured.formula_bytes}")
    return faults


def show(result: dict[str, Any]) -> None:
    dense = next(row for row in result["rows"] if row["slot"] == _BASELINE)
    for row in result["rows"]:
        cells = [
            link_text(result),
            row["slot"],
            f"{row['bytes']:,}",
            f"{dense['bytes'] / row['bytes']:.1f}",
            f"{row['wire_over_counted']:.3f}",
            f"{row['computing_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['measured_s'] * 1e3:.1f}",
            f"{row['measured_over_predicted']:.3f}",
            f"{dense['measured_s'] / row['measured_s']:.2f}",
        ]
        show_row(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="50mbit,200mbit,1gbit")
    parser.add_argument("--slots", default=",".join(SLOTS))
    parser.add_argument("--elems", type=int, default=1 << 22)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    names = tuple(given.slots.split(","))
    if unknown := set(names) - set(SLOTS):
        parser.error(f"no slots {', '.join(sorted(unknown))}; there are {', '.join(SLOTS)}")
    if _BASELINE not in names:
        parser.error(f"--slots must name {_BASELINE}, which the others are compared with")
    plan = Plan(slots=names, num_elems=given.elems, rounds=given.rounds)
    sys.stdout.write(
        "| link (payload rate) | slot | bytes sent | x fewer | on the wire | computing ms | predicted ms | median ms | median / "
        f"predicted | x {_BASELINE} |\n|---|---|{'--:|' * 8}\n"
    )
    results, left_out = measure_links(given.links, lambda name: run_link(name, plan, given.nodes), show)
    return finish(results, left_out, {"elems": given.elems, "nodes": given.nodes})


if __name__ == "__main__":
    raise SystemExit(main())
