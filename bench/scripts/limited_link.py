"""AllReduce over a wire that is really slow: measured, and what bytes / bandwidth + computing predicts.

    sudo python bench/scripts/limited_link.py [--links 200mbit,1gbit,2.5gbit] [--size 16MiB] [--ranks 2] [--rounds 7]
                                           [--algorithms two-shot,flash-int8,...]

Each rank is a process in a network namespace of its own; the kernel limits what passes between them (tc tbf), and gloo
carries it. For every link and algorithm:

    predicted = bytes that a rank sends / rate that a bulk TCP transfer reaches on this wire + computing alone

where computing alone is the same algorithm on all ranks at once, over a transport that hands every message back at no
cost: encoding, summing, decoding and putting slices together. "On the wire" is what the kernel counted at the interface
(in large packets, before they are cut), over the bytes that the algorithm counted. Algorithms take turns in random
order, every result is checked, and the median of the rounds counts. With several links, for each quantized AllReduce the
bandwidth at which it stops paying: measured, where the time that it saves, a straight line in 1 / bandwidth between two
links, crosses zero; and as the policy's cost model predicts it from computing alone, the median of all links. Prints
Markdown; the last line is one JSON object. Exit code 1: a link that this machine cannot carry (the others are measured)
or a wrong answer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from link_sweep import crossover_row, measured_crossover, show_crossovers
from link_table import finish, link_text, measure_links, show_row

from tightwire.bench.comm.computing import ComputingPlan, compute_alone
from tightwire.bench.comm.measure import MeasurePlan, measure
from tightwire.bench.comm.options import CommBenchOptions
from tightwire.bench.comm.ranks import open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.link.emulated_network import interface_bytes
from tightwire.comm.link.link import parse_link
from tightwire.comm.policy.setting import Setting
from tightwire.comm.sizes import parse_bytes

_ALGORITHMS = "two-shot,flash-int8,flash-int6-uniform,flash-int5,flash-int4"
_DTYPE = "bfloat16"
_BASELINE = "two-shot"
_SETTLE_S = 0.1


def count_wire(group: Group, plan: MeasurePlan) -> Iterator[dict[str, float]]:
    """Bytes that this rank's interface sent in one call of each algorithm, over the bytes that the call counted."""
    x = torch.zeros(plan.sizes[0] // 2, dtype=torch.bfloat16)
    shares: dict[str, float] = {}
    for name in plan.algorithms:
        all_reduce = make_all_reduce(name, group)
        group.transport.barrier()
        time.sleep(_SETTLE_S)  # for the barrier's own last packets
        counted_before, sent_before = group.bytes_sent, interface_bytes()
        all_reduce(x)
        time.sleep(_SETTLE_S)
        shares[name] = (interface_bytes() - sent_before) / (group.bytes_sent - counted_before)
    yield shares


def run_link(name: str, algorithms: tuple[str, ...], size: int, ranks: int, rounds: int) -> dict[str, Any]:
    """One wire: its measured rate, and a row for each algorithm."""
    options = CommBenchOptions(algorithms=algorithms, sizes=(size,), ranks=ranks, link=parse_link(name))
    plan = MeasurePlan(algorithms=algorithms, sizes=(size,), dtype=_DTYPE, repeats=rounds, seconds_per_size=1e9, seed=0)
    cells = Cells(ranks)
    alone, wire = dict.fromkeys(algorithms, 0.0), dict.fromkeys(algorithms, 0.0)
    with open_ranks(options) as (processes, facts):
        if facts["link"]["measured_bytes_per_s"] is None:
            raise SystemExit(f"a real wire is needed: {facts['link']['why']}")
        watch = OthersWatch(processes.pids)
        computing = ComputingPlan(algorithms=algorithms, sizes=(size,), dtype=_DTYPE, repeats=rounds)
        for _, computed in processes.stream(compute_alone, computing):
            alone[computed.algorithm] = max(alone[computed.algorithm], statistics.median(computed.seconds))
        for _, shares in processes.stream(count_wire, plan):
            for algorithm, share in shares.items():
                wire[algorithm] = max(wire[algorithm], share)
        for rank, event in processes.stream(measure, plan):
            cells.add(rank, event)
        others_share = watch.share()
    rate = facts["link"]["measured_bytes_per_s"]
    return {
        "link": name,
        "measured_bytes_per_s": rate,
        "others_share": others_share,
        "rows": [_row(cell, rate, alone[cell["algorithm"]], wire[cell["algorithm"]]) for cell in cells.rows()],
        "faults": cells.faults(),
    }


def _row(cell: dict[str, Any], rate: float, alone_s: float, wire_over_counted: float) -> dict[str, Any]:
    predicted_s = cell["wire_bytes"] / rate + alone_s
    return {
        "algorithm": cell["algorithm"],
        "wire_bytes": cell["wire_bytes"],
        "wire_over_counted": wire_over_counted,
        "measured_s": cell["seconds"]["p50"],
        "best_s": cell["seconds"]["min"],
        "predicted_s": predicted_s,
        "computing_s": alone_s,
        "measured_over_predicted": cell["seconds"]["p50"] / predicted_s,
        "relative_error": cell["relative_error"],
    }


def crossovers(results: list[dict[str, Any]], size: int, ranks: int) -> list[dict[str, Any]]:
    """For each quantized AllReduce the measured and the predicted rate at which it stops paying."""
    by_name: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for result in results:
        for row in result["rows"]:
            by_name.setdefault(row["algorithm"], []).append((result["measured_bytes_per_s"], row))
    computing = {
        name: [(size, statistics.median(row["computing_s"] for _, row in rows) * 1e6)] for name, rows in by_name.items()
    }
    setting = Setting("process-group", "cpu", ranks, ranks, _DTYPE)
    found = []
    for name, rows in by_name.items():
        if parse_all_reduce(name).codecs:
            saved = [
                (rate, exact["measured_s"] - row["measured_s"])
                for (rate, exact), (_, row) in zip(by_name[_BASELINE], rows, strict=True)
            ]
            found.append(crossover_row(name, _BASELINE, measured_crossover(saved), setting, size, computing))
    return found


def _show(result: dict[str, Any]) -> None:
    baseline_s = next(row["measured_s"] for row in result["rows"] if row["algorithm"] == _BASELINE)
    for row in result["rows"]:
        cells = [
            link_text(result),
            row["algorithm"],
            f"{row['wire_bytes']:,}",
            f"{row['wire_over_counted']:.3f}",
            f"{row['computing_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['best_s'] * 1e3:.1f}",
            f"{row['measured_s'] * 1e3:.1f}",
            f"{row['measured_over_predicted']:.3f}",
            f"{baseline_s / row['measured_s']:.2f}",
            f"{row['relative_error']:.1e}",
        ]
        show_row(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="200mbit,1gbit,2.5gbit")
    parser.add_argument("--algorithms", type=split_all_reduce_names, default=_ALGORITHMS)
    parser.add_argument("--size", type=parse_bytes, default=16 << 20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if _BASELINE not in given.algorithms:
        parser.error(f"--algorithms must name {_BASELINE}, which the others are compared with")
    sys.stdout.write(
        f"| link (payload rate) | algorithm | bytes sent | on the wire | computing ms | predicted ms | best ms | median ms | median / "
        f"predicted | x {_BASELINE} | rel. error |\n|---|---|{'--:|' * 9}\n"
    )
    results, left_out = measure_links(
        given.links, lambda name: run_link(name, tuple(given.algorithms), given.size, given.ranks, given.rounds), _show
    )
    found = crossovers(results, given.size, given.ranks)
    if len(results) > 1:
        show_crossovers(found)
    return finish(results, left_out, {"size": given.size, "crossovers": found})


if __name__ == "__main__":
    raise SystemExit(main())
