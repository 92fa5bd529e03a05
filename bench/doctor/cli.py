"""``tightwire doctor``: runs the probes, prints findings and advice, or one JSON object."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightwire.bench.doctor.advice import Advice, advise
from tightwire.bench.doctor.facts import CudaFacts
from tightwire.bench.doctor.probing import Finding, run_probe

_PACKAGE = "tightwire.bench.doctor"
# Name -> "module:function". These only read, all at once; PEERS tests hardware.
LOOKING = {
    "processor": f"{_PACKAGE}.host:cpu",
    "memory": f"{_PACKAGE}.host:memory",
    "GPUs": f"{_PACKAGE}.gpus:gpus",
    "torch": f"{_PACKAGE}.gpus:cuda",
    "PCIe": f"{_PACKAGE}.host:pci",
    "isolation": f"{_PACKAGE}.host:isolation",
    "network": f"{_PACKAGE}.host:network",
    "versions": f"{_PACKAGE}.host:versions",
}
PEERS = f"{_PACKAGE}.gpus:peers"
_STYLES = {"problem": "bold red", "note": "yellow", "use": "bold green"}


class Report(msgspec.Struct, frozen=True):
    """The output of ``--json``. ``ok``: no probe failed and there is no problem."""

    ok: bool
    findings: list[Finding]
    advice: list[Advice]


def main(argv: Sequence[str]) -> int:
    """``tightwire doctor``: exit code 0, or 1 for a problem or a failed probe."""
    parser = argparse.ArgumentParser(
        prog="tightwire doctor",
        description="Examine this machine's devices, links and memory, test peer access, and suggest "
        "options. Each probe has its own process and time limit.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout-s",
        type=_number(float, lambda value: 0 < value <= 3600, "more than 0 and at most 3600 seconds"),
        default=60.0,
        metavar="S",
        help="limit of each probe (default: %(default)g)",
    )
    parser.add_argument(
        "--tp",
        type=_number(int, lambda value: value >= 1, "a whole number of at least 1"),
        default=2,
        metavar="N",
        help="number of ranks on a machine without a GPU (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    waiting = Console(stderr=True).status("probing") if sys.stderr.isatty() else contextlib.nullcontext()
    with waiting:
        findings = asyncio.run(examine(args.timeout_s))
    advice = advise(findings, args.tp)
    report = Report(all(item.kind != "problem" for item in advice), findings, advice)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        show(findings, advice, Console(highlight=False))
    return 0 if report.ok else 1


async def examine(limit_s: float) -> list[Finding]:
    """All findings; peer access is tested where the driver claims it."""
    findings = list(await asyncio.gather(*(run_probe(name, target, limit_s) for name, target in LOOKING.items())))
    if any(isinstance(finding.facts, CudaFacts) and finding.facts.peers for finding in findings):
        findings.append(await run_probe("peer access", PEERS, limit_s))
    return findings


def _number(kind: type[float], is_allowed: Callable[[float], bool], range_text: str) -> Callable[[str], float]:
    def from_text(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {range_text}, got {text}")
        return value

    return from_text


def show(findings: Sequence[Finding], advice: Sequence[Advice], console: Console) -> None:
    """Print a section for each finding, then the advice; fits 80 columns."""
    grid = Table.grid(padding=(0, 2))
    for finding in findings:
        rows = list(finding.facts.rows()) if finding.facts is not None else []
        if finding.problem is not None:
            rows.append(("", f"the probe {finding.problem}"))
        for number, (label, text) in enumerate(rows):
            grid.add_row(Text("" if number else finding.probe, "bold"), label, Text(text))
    console.print(grid)
    console.print()
    grid = Table.grid(padding=(0, 2))
    for item in advice:
        text = Text.assemble((f"{item.options}\n" if item.options else "", "bold"), item.text)
        grid.add_row(Text(item.kind, _STYLES[item.kind]), text)
    console.print(grid)
