"""Uses a machine with a GPU completely: runs every stage that its time allows, goes on after a failure, and ends with one line of JSON.

``make gpu-check`` needs no network: what this Python lacks is taken from gpu-wheels/, which ``make gpu-wheels`` fills on a
machine with one (``--wheels``). gpu-check-out/ (or the folder $OUT) gets results.json after every stage, log.txt and server.log
with all output as it comes.
``gpu_stages.py`` has the stages, ``gpu_sizes.py`` their sizes, ``gpu_programs.py`` what runs on the device itself.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_machine import ROOT, SITE, LeftOutError, Machine, Stage
from gpu_sizes import FULL, SMALL
from gpu_stages import STAGES, asked

WHEELS = ROOT / "gpu-wheels"
# What images with torch, Triton and transformers lack.
PACKAGES = [
    "annotated-types",
    "cffi",
    "fastapi",
    "gguf",
    "msgspec",
    "opentelemetry-api",
    "pycparser",
    "pydantic",
    "pydantic-core",
    "pytest-asyncio",
    "pytest-timeout",
    "pyzmq",
    "starlette",
    "typing-inspection",
    "uvicorn",
]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_WHEEL_BYTES = 64 << 20
TOTAL_S = 560.0  # of all stages together; --total-s is another limit
_LEAST_SHARE = 0.5  # of a stage's limit that must be left for it to begin


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def install_wheels(machine: Machine) -> list[str]:
    """Unpack those wheels of gpu-wheels/ whose package this Python lacks; their names. RuntimeError: a package is still missing."""
    found = {normal(name) for each in importlib.metadata.distributions() if (name := each.name)}
    missing = [each for each in WHEELS.glob("*.whl") if normal(each.name.split("-")[0]) not in found]
    if missing:
        pip = sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"
        machine.run((*pip, str(SITE), *map(str, missing)))
    there = found | {normal(each.name.split("-")[0]) for each in missing}
    absent = sorted(set(PACKAGES) - there)
    absent += [name for name in ("torch", "triton", "pytest") if importlib.util.find_spec(name) is None]
    if absent:
        raise RuntimeError(
            f"missing: {', '.join(absent)}; `make gpu-wheels` where there is a network fills {WHEELS.name}/"
        )
    return sorted(each.name for each in missing)


def fetch_wheels() -> None:
    """Fill gpu-wheels/ for Python 3.12 with the pinned versions. Needs a package index."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line.split("==")[0]): line for line in lines}
    wanted = [pinned.get(name, name) for name in PACKAGES]
    pip = sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    subprocess.run([*pip, "--implementation", "cp", *platforms, "-d", str(WHEELS), *wanted], check=True)
    if (num_bytes := sum(each.stat().st_size for each in WHEELS.iterdir())) > MOST_WHEEL_BYTES:
        raise SystemExit(f"{WHEELS} has {num_bytes / 2**20:.0f} MiB; at most {MOST_WHEEL_BYTES >> 20}")


def run_stage(machine: Machine, stage: Stage) -> dict[str, Any]:
    """What is known after the stage. ``status``: ok, failed, or left out, which says what the machine lacks."""
    try:
        return {"status": "ok", "figures": stage.run(machine)}
    except LeftOutError as error:
        return {"status": "left out", "reason": str(error), "figures": error.figures}
    except Exception as error:  # noqa: BLE001 - whatever a stage raises, the others run
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        return {"status": "failed", "reason": f"{kind}{error}", "figures": getattr(error, "figures", None)}


def check(
    machine: Machine,
    stages: Sequence[Stage],
    *,
    total_s: float = TOTAL_S,
    limit_s: float | None = None,
    known: Mapping[str, Any] | None = None,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Run the stages; results.json, and ``kept``, have what is known after each. ``limit_s``: of every stage; ``known``: of earlier ones."""
    end = time.monotonic() + total_s
    results: dict[str, Any] = {"ok": False, "asked": [], "stages": dict(known or {})}
    for stage in stages:
        begin, limit = time.monotonic(), limit_s or stage.limit_s
        if end - begin < _LEAST_SHARE * limit:
            result = {
                "status": "skipped",
                "reason": f"{max(0.0, end - begin):.0f} s are left, and it may take {limit:g} s",
            }
        else:
            machine.deadline = min(end, begin + limit)
            result = run_stage(machine, stage)
        results["stages"][stage.name] = {**result, "seconds": round(time.monotonic() - begin, 1)}
        results["asked"] = asked(results["stages"])
        results["ok"] = all(each["status"] in ("ok", "left out") for each in results["stages"].values())
        for path in filter(None, (machine.out / "results.json", kept)):
            path.write_text(json.dumps(results, indent=1))
        seconds, reason = results["stages"][stage.name]["seconds"], result.get("reason", "")
        sys.stderr.write(f"{stage.name}: {result['status']}, {seconds:g} s{': ' * bool(reason)}{reason}\n")
        if stage.name == "packages" and result["status"] == "failed":
            break  # nothing else would run
    return results


def table(results: Mapping[str, Any]) -> str:
    """Asked and measured, and the stages that were not run."""
    lines = [f"{'figure':66} {'asked':>14} {'measured':>10}"]
    for row in results["asked"]:
        measured = "-" if row["measured"] is None else f"{row['measured']:.3f}"
        lines.append(f"{row['figure']:66} {row['asked']:>14} {measured:>10} {'missed' if row['met'] is False else ''}")
    for status in ("failed", "left out", "skipped"):
        if names := [name for name, each in results["stages"].items() if each["status"] == status]:
            lines.append(f"{status}: {', '.join(names)}")
    if any(each["status"] == "skipped" for each in results["stages"].values()):
        lines.append('another command goes on: make gpu-check ARGS="--go-on"')
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    stages = (Stage("packages", install_wheels, 60), *STAGES)
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--stages", metavar="A,B", help=f"stages to run (default: {','.join(names)})")
    parser.add_argument("--go-on", action="store_true", help="keep earlier results; run what was skipped, or --stages")
    parser.add_argument(
        "--total-s", type=float, default=TOTAL_S, metavar="S", help="of all stages (default: %(default)g)"
    )
    parser.add_argument("--limit-s", type=float, metavar="S", help="of every stage (default: its own)")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on an emulated device: needs no GPU")
    parser.add_argument("--wheels", action="store_true", help="fill gpu-wheels/ instead")
    args = parser.parse_args(argv)
    wanted = args.stages.split(",") if args.stages else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--stages: there is no stage {', '.join(unknown)}; stages are {', '.join(names)}")
    if args.wheels:
        fetch_wheels()
        return 0
    out = Path(os.environ.get("OUT", ROOT / "gpu-check-out")).resolve()
    for folder in (out, SITE):
        folder.mkdir(parents=True, exist_ok=True)
    kept = SITE / ("rehearsal.json" if args.rehearse else "results.json")
    known = json.loads(kept.read_text())["stages"] if args.go_on and kept.exists() else {}
    again = set(wanted) if args.stages else {name for name, each in known.items() if each["status"] == "skipped"}
    known = {name: each for name, each in known.items() if name not in again}
    machine = Machine(out, SMALL if args.rehearse else FULL, emulated=args.rehearse)
    chosen = [stage for stage in stages if stage.name in wanted and stage.name not in known]
    results = check(machine, chosen, total_s=args.total_s, limit_s=args.limit_s, known=known, kept=kept)
    if args.rehearse:
        sys.stdout.write("figures of an emulated device, which mean nothing:\n")
    sys.stdout.write(table(results))
    brief = {name: each["status"] for name, each in results["stages"].items()}
    sys.stdout.write(json.dumps({**results, "stages": brief}) + "\n")
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
