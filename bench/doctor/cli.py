"""``tightwire doctor``: run the probes, show what they found and what it means."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console

from tightwire.bench.doctor.advice import Advice, advise
from tightwire.bench.doctor.facts import CudaFacts, MemoryFacts
from tightwire.bench.doctor.page import show
from tightwire.bench.doctor.probing import Finding, run_probe

_PACKAGE = "tightwire.bench.doctor"
# Name -> "module:function". The first group looks at things, all at once; the second does things, one after the other.
LOOKING = {
    "processor": f"{_PACKAGE}.host:cpu",
    "memory": f"{_PACKAGE}.host:memory",
    "GPUs": f"{_PACKAGE}.nvidia:gpus",
    "torch": f"{_PACKAGE}.devices:cuda",
    "PCIe": f"{_PACKAGE}.pci:pci",
    "isolation": f"{_PACKAGE}.pci:isolation",
    "network": f"{_PACKAGE}.host:network",
    "versions": f"{_PACKAGE}.host:versions",
}
PEERS = f"{_PACKAGE}.devices:peers"
ROUND_TRIP = f"{_PACKAGE}.devices:round_trip"


class Report(msgspec.Struct, frozen=True):
    """What ``--json`` prints. ``ok``: no probe failed and nothing is wrong."""

    ok: bool
    findings: list[Finding]
    advice: list[Advice]


def main(argv: Sequence[str]) -> int:
    """``tightwire doctor``: exit code 0 when all is well, 1 when something is wrong or a probe failed."""
    parser = argparse.ArgumentParser(
        prog="tightwire doctor",
        description="Look at this machine's devices, links and memory, try what others only claim, and say which "
        "options to start with. Each probe has a process and a time limit of its own.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    parser.add_argument(
        "--timeout-s", type=_positive, default=60.0, metavar="S", help="limit of each probe (default: %(default)g)"
    )
    parser.add_argument(
        "--tp",
        type=_ranks,
        default=2,
        metavar="N",
        help="ranks you mean to run where there is no GPU (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    waiting = Console(stderr=True).status("probing") if sys.stderr.isatty() else contextlib.nullcontext()
    with waiting:
        findings = asyncio.run(examine(args.timeout_s))
    advice = advise(findings, args.tp)
    report = Report(all(item.kind != "problem" for item in advice), findings, advice)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        show(findings, advice, console)
    return 0 if report.ok else 1


async def examine(limit_s: float) -> list[Finding]:
    """All findings; what was found decides which of the trying probes are needed."""
    findings = list(await asyncio.gather(*(run_probe(name, target, limit_s) for name, target in LOOKING.items())))
    for finding in tuple(findings):
        match finding.facts:
            case CudaFacts(peers=[_, *_]):
                findings.append(await run_probe("peer access", PEERS, limit_s))
            case MemoryFacts(shared_memory_problem=None):
                findings.append(await run_probe("round trip", ROUND_TRIP, limit_s))
    return findings


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 3600 seconds, got {text}")
    return value


def _ranks(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return value
