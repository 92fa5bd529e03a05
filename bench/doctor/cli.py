"""``tightwire doctor``: prints a verdict, what was found, and advice, or one JSON object."""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightwire.bench.doctor.advice import Advice, Facts, Speed, advise, describe_verdict
from tightwire.bench.doctor.gpus import read_driver, read_torch
from tightwire.bench.doctor.host import read_host
from tightwire.bench.doctor.probing import run_probe
from tightwire.bench.report.quiet import QUIET_SHARE, OthersWatch, describe_others
from tightwire.model.checkpoint.catalog import is_cached
from tightwire.sizes import format_bytes

_STYLES = {"problem": "bold red", "note": "yellow", "use": "bold green"}
_MODEL = "smollm2-135m"
_PROMPT, _NUM_TOKENS = "Count to one hundred: 1, 2, 3, 4,", 48  # the answer does not end earlier


class Report(Struct, frozen=True):
    """The output of ``--json``. ``ok``: no probe failed and there is no problem."""

    ok: bool
    verdict: str
    facts: Facts
    speed: Speed
    advice: list[Advice]


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 for a problem or a failed probe, or 2 for a model that is not supported."""
    parser = argparse.ArgumentParser(
        prog="tightwire doctor",
        description="Examine this machine's devices, links and memory, test peer access, measure the speed of a small model, "
        "and suggest options.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="say what this model is, its formats, its memory and a bound of its speed here instead; fetched if it is not here",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show every fact, and what is missing")
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="S", help="limit of each probe (default: %(default)g)"
    )
    parser.add_argument(
        "--tp", type=int, default=2, metavar="N", help="ranks on CPUs, or of MODEL (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.timeout_s <= 3600:
        parser.error(f"--timeout-s must be more than 0 and at most 3600 seconds, got {args.timeout_s:g}")
    if args.tp < 1:
        parser.error(f"--tp must be at least 1, got {args.tp}")
    if args.model is not None:
        return _examine_model(args.model, args.tp, as_json=args.json)
    report = examine(args.timeout_s, args.tp)
    if args.json:
        _write_json(report)
    else:
        show(report, Console(highlight=False), verbose=args.verbose)
    return 0 if report.ok else 1


def _examine_model(model: str, tp: int, *, as_json: bool) -> int:
    from tightwire.bench.doctor.model import describe_model, examine_model  # imports torch

    found = examine_model(model, tp)
    if as_json:
        _write_json(found)
    elif found.unsupported:
        sys.stderr.write(f"tightwire doctor: {found.unsupported}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in describe_model(found))
    return 2 if found.unsupported else 0


def _write_json(report: Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


def examine(limit_s: float, tp: int) -> Report:
    """Runs all probes; each that may hang ends after ``limit_s``."""
    with _waiting("reading processor, memory and devices"):
        driver, driver_problem = read_driver(limit_s)
        torch, torch_problem = read_torch(limit_s)
        failures = {name: why for name, why in (("GPUs", driver_problem), ("torch", torch_problem)) if why}
        facts = Facts(host=read_host(), driver=driver, torch=torch, failures=failures)
    advice = advise(facts, tp)
    options = next(item.options for item in advice if item.kind == "use")
    with _waiting(f"measuring the speed of {_MODEL}, about 5 s"):
        speed = measure_speed(options, limit_s)
    verdict = describe_verdict(facts, options, speed)
    return Report(all(item.kind != "problem" for item in advice), verdict, facts, speed, advice)


def measure_speed(options: str, limit_s: float) -> Speed:
    """Generate with ``options``; the first token, which needs the prompt, does not count."""
    if not is_cached(_MODEL):
        return Speed(_MODEL, reason=f"`tightwire pull` fetches {_MODEL}, and doctor then measures its speed")
    command = [sys.executable, "-m", "tightwire", "generate", "--model", _MODEL, "--max-tokens", str(_NUM_TOKENS)]
    watch = OthersWatch()
    output = run_probe([*command, *options.split(), _PROMPT], limit_s)
    if output.problem or len(output.times_s) < 2:
        return Speed(_MODEL, reason=f"its speed is unknown: `tightwire generate` {output.problem or 'printed nothing'}")
    busy = describe_others(share) if (share := watch.share()) > QUIET_SHARE else ""
    return Speed(_MODEL, (_NUM_TOKENS - 1) / (output.times_s[-1] - output.times_s[0]), busy)


def show(report: Report, console: Console, *, verbose: bool) -> None:
    """Print the verdict, the facts and the advice; fits 80 columns."""
    console.print(Text(report.verdict, "bold"), end="\n\n")
    shown = _facts("", msgspec.to_builtins(report.facts)) if verbose else _summary(report.facts)
    _print_grid(console, ((Text(name, "bold"), Text(text)) for name, text in shown))
    console.print()
    described = (
        (Text(item.kind, _STYLES[item.kind]), Text.assemble((item.options and f"{item.options}: ", "bold"), item.text))
        for item in report.advice
    )
    _print_grid(console, described)
    if not verbose:
        console.print("\n`tightwire doctor --verbose` shows all it found.", style="dim")


def _summary(facts: Facts) -> Iterator[tuple[str, str]]:
    host = facts.host
    quota = f" of {host.num_allowed}" if host.num_usable < host.num_allowed else ""
    yield "processor", f"{host.cpu}; {host.num_usable}{quota} usable cores, CPU kernels {host.kernels}"
    works = host.shared_memory_problem or "ranks can share memory"
    yield "memory", f"{format_bytes(host.available_bytes)} free of {format_bytes(host.total_bytes)}; {works}"
    for gpu in facts.driver.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, driver {gpu.driver}"
    yield "software", ", ".join(f"{name} {host.software[name]}" for name in ("tightwire", "torch", "python"))


def _facts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every fact with its path, such as ``host.numa_nodes``."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _facts(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield from _facts(f"{path}.{number}", inner)
    else:
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        yield path, format_bytes(value) if path.endswith("_bytes") and isinstance(value, int) else text


def _print_grid(console: Console, rows: Iterable[tuple[Text, Text]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _waiting(text: str) -> contextlib.AbstractContextManager[object]:
    return Console(stderr=True).status(text) if sys.stderr.isatty() else contextlib.nullcontext()
