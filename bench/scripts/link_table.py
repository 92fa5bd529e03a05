"""What benchmarks over wires that are really slow have in common: link after link, then what was wrong and one JSON object."""

import json
import sys
from collections.abc import Callable
from typing import Any

from tightwire.bench.report.environment import describe_environment
from tightwire.comm.link.wire import LinkTooFastError


def measure_links(
    links: str, run_link: Callable[[str], dict[str, Any]], show: Callable[[dict[str, Any]], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of the links that this machine can carry, shown as they come, and why the others were left out."""
    results, left_out = [], {}
    for name in links.split(","):
        try:
            results.append(run_link(name))
        except LinkTooFastError as error:
            left_out[name] = str(error)
            sys.stderr.write(f"{error}\n")
            continue
        show(results[-1])
    return results, left_out


def link_text(result: dict[str, Any]) -> str:
    return f"{result['link']} ({result['measured_bytes_per_s'] * 8 / 1e6:.0f} Mbit/s)"


def show_row(cells: list[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def finish(results: list[dict[str, Any]], left_out: dict[str, str], facts: dict[str, Any]) -> int:
    """Say how quiet it was and what is wrong, and print it all on one line; the exit code."""
    for result in results:
        sys.stdout.write(f"\n{result['link']}: others used {result['others_share']:.0%} of the cores")
        for fault in result["faults"]:
            sys.stdout.write(f"\nwrong: {fault}")
    line = {"environment": describe_environment(), **facts, "links": results, "left_out": left_out}
    sys.stdout.write(f"\n\n{json.dumps(line)}\n")
    return 1 if left_out or any(result["faults"] for result in results) else 0
