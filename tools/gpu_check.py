"""Uses a machine with a GPU completely: runs every stage, goes on after a failure, and ends with one line of JSON.

``make gpu-check`` needs no network: what this Python lacks is taken from gpu-wheels/, which ``make gpu-wheels`` fills on a
machine with one (``--wheels``). The folder $OUT gets results.json after every stage, and log.txt with all output.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, SITE = ROOT / "gpu-wheels", ROOT / "build" / "gpu-check"
# What images with torch, Triton and transformers lack. The folder may have 64 MiB.
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
    "pyzmq",
    "starlette",
    "typing-inspection",
    "uvicorn",
]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_WHEEL_BYTES = 64 << 20
LIMIT_S = 540.0  # of a stage

TIGHTWIRE = (sys.executable, "-m", "tightwire")
FACTS = """import json, sys, torch, triton
print(json.dumps({"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__,
"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"""

BUILD = "from tightwire.kernels.cpu import library; library.load(); print(library.level())"


@dataclass(frozen=True)
class Stage:
    """``run`` returns figures, or raises. ``needs``: a package without which the stage is left out."""

    name: str
    run: Callable[["Machine"], Any]
    needs: str = ""


class Machine:
    """Runs commands with a limit, and keeps their output in ``out``/log.txt."""

    def __init__(self, out: Path, model: str, limit_s: float) -> None:
        self.out, self.model, self.limit_s = out, model, limit_s
        self.environment = dict(os.environ)
        folders = [*filter(None, [os.environ.get("PYTHONPATH")]), f"{ROOT}/src", f"{ROOT}/tests", str(SITE)]
        self.environment["PYTHONPATH"] = os.pathsep.join(folders)

    def run(self, command: Sequence[str], limit_s: float | None = None) -> str:
        """The command's standard output. RuntimeError: it failed or took longer; its process group is ended."""
        with (self.out / "log.txt").open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=self.environment, start_new_session=True
            )
            failure, limit_s = "", limit_s or self.limit_s
            try:
                data, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                failure = f"took longer than {limit_s:g} s"
                os.killpg(child.pid, signal.SIGKILL)
                data, _ = child.communicate()
            log.write(data)
        if failure or child.returncode:
            raise RuntimeError(
                failure or f"ended with {child.returncode}; {data.decode()[-300:].strip() or 'see log.txt'}"
            )
        return data.decode()

    def figures(self, *command: str) -> Any:
        """The JSON object at the end of a command's output."""
        text = self.run(command).strip()
        return json.loads(text if text.startswith("{") else text.splitlines()[-1])


def tests(machine: Machine) -> str:
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "gpu or multi_gpu",
        "tests/gpu",
    )
    return machine.run(command).strip().splitlines()[-1]


def answers(machine: Machine) -> dict[str, str]:
    """Greedy answers of a tiny model: from graphs, kernel by kernel, planned one by one, and from the CPU."""
    made = "import pathlib, tiny; print(tiny.make_tiny(pathlib.Path({!r})))".format(str(SITE / "tiny"))
    folder = machine.run((sys.executable, "-c", made)).strip()
    ways = {
        "graphs": ("--device", "cuda"),
        "eager": ("--device", "cuda", "--no-cuda-graphs"),
        "one by one": ("--device", "cuda", "--plan-ahead", "off"),
        "cpu": ("--device", "cpu"),
    }
    sizes = "--max-tokens", "8", "--max-num-seqs", "1", "--max-model-len", "64"  # few graphs: each is captured
    common = *TIGHTWIRE, "generate", "--model", folder, "--dtype", "float32", *sizes
    found = {way: machine.run((*common, *options, "The wire is long")) for way, options in ways.items()}
    if len(set(found.values())) > 1:
        raise RuntimeError(f"answers differ: {found}")
    return found


def load(*options: str) -> Callable[[Machine], Any]:
    """A stage that serves the model with ``options`` and puts load on it."""

    def run(machine: Machine) -> Any:
        port, deadline = "8137", time.monotonic() + machine.limit_s
        command = *TIGHTWIRE, "serve", machine.model, "--device", "cuda", "--port", port, *options
        with (machine.out / "log.txt").open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            server = subprocess.Popen(
                command, cwd=ROOT, env=machine.environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while not _healthy(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server ended; see log.txt" if server.poll() is not None else "no server")
                time.sleep(0.5)
            sizes = "--concurrency", "1,16", "--num-requests", "4,32", "--input-len", "512", "--output-len", "128"
            if machine.model != MODEL:
                sizes = "--concurrency", "2", "--num-requests", "2", "--input-len", "8", "--output-len", "4"
            return machine.figures(
                *TIGHTWIRE, "bench", "serve", "--url", f"http://127.0.0.1:{port}", *sizes, "--warmups", "2", "--json"
            )
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)

    return run


def _healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def bench(*arguments: str, model: bool = False) -> Callable[[Machine], Any]:
    return lambda machine: machine.figures(
        *TIGHTWIRE, "bench", *arguments, *([machine.model] if model else []), "--json"
    )


def sums(machine: Machine) -> Any:
    """AllReduces between GPUs, where there are two."""
    if len(machine.figures(sys.executable, "-c", FACTS)["devices"]) < 2:
        return "left out: it needs two devices"
    return bench("comm", "--device", "cuda")(machine)


def train(machine: Machine) -> str:
    folder = f"run={machine.out.resolve() / 'train'}"
    return machine.run((*TIGHTWIRE, "train", "pretrain-10m", "device=cuda", "schedule.steps=1", folder))[-500:]


MODEL = "random:llama-3-8b"
_FROM_HOST = ("--device", "cuda", "--sources", "host", "--tp", "1")
STAGES = (
    Stage("facts", lambda machine: machine.figures(sys.executable, "-c", FACTS)),
    Stage("build", lambda machine: machine.run((sys.executable, "-c", BUILD))),
    Stage("doctor", lambda machine: machine.figures(*TIGHTWIRE, "doctor", "--json")),
    Stage("answers", answers),
    Stage("serve", load()),
    Stage("tests", tests, "pytest"),
    Stage("kernels", bench("kernels", "--device", "cuda")),
    Stage("roofline", bench("lab", "roofline", "--device", "cuda", model=True)),
    Stage("eager", load("--no-cuda-graphs")),
    Stage("one by one", load("--plan-ahead", "off")),
    Stage("int4", load("--quantization", "int4")),
    Stage("stream", bench("stream", *_FROM_HOST, model=True)),
    Stage("train", train),
    Stage("sums", sums),
    Stage("vllm", bench("lab", "peers", "--servers", "vllm,tightwire-tp1", "--rounds", "1"), "vllm"),
    Stage("stream 70B", bench("stream", "random:llama-3-70b", *_FROM_HOST, "--quantization", "int4")),
)


def install_wheels() -> list[str]:
    """Unpack those of the carried wheels whose package this Python lacks; returns their names."""
    found = {name.lower().replace("_", "-") for each in importlib.metadata.distributions() if (name := each.name)}
    missing = [each for each in WHEELS.glob("*.whl") if each.name.split("-")[0].lower().replace("_", "-") not in found]
    if missing:
        pip = (
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--upgrade",
            "--target",
            str(SITE),
        )
        subprocess.run([*pip, *map(str, missing)], check=True)
    return sorted(each.name for each in missing)


def fetch_wheels() -> None:
    """Fill gpu-wheels/ for Python 3.12 with the pinned versions. Needs a package index."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-"): line for line in lines}
    wanted = [pinned.get(name, name) for name in PACKAGES]
    pip = sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    subprocess.run([*pip, "--implementation", "cp", *platforms, "-d", str(WHEELS), *wanted], check=True)
    if (num_bytes := sum(each.stat().st_size for each in WHEELS.iterdir())) > MOST_WHEEL_BYTES:
        raise SystemExit(f"{WHEELS} has {num_bytes / 2**20:.0f} MiB, and a check may carry {MOST_WHEEL_BYTES >> 20}")


def check(machine: Machine, stages: Sequence[Stage]) -> dict[str, Any]:
    """Run the stages; results.json has what is known after each."""
    results: dict[str, Any] = {"ok": False, "wheels": install_wheels(), "stages": {}}
    for stage in stages:
        begin_s, result = time.monotonic(), dict[str, Any]()
        if stage.needs and importlib.util.find_spec(stage.needs) is None:
            result = {"ok": True, "left_out": f"{stage.needs} is not installed"}
        else:
            try:
                result = {"ok": True, "figures": stage.run(machine)}
            except (RuntimeError, ValueError, OSError) as error:
                result = {"ok": False, "error": str(error)}
        results["stages"][stage.name] = {**result, "seconds": round(time.monotonic() - begin_s, 1)}
        results["ok"] = all(each["ok"] for each in results["stages"].values())
        (machine.out / "results.json").write_text(json.dumps(results, indent=1))
        sys.stderr.write(f"{stage.name}: {result.get('error') or result.get('left_out') or 'ok'}\n")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--stages", default=",".join(names), metavar="A,B", help="stages to run (default: %(default)s)")
    parser.add_argument("--model", default=MODEL, help="the model that is served (default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="S", help="limit of a stage (default: %(default)g)"
    )
    parser.add_argument("--wheels", action="store_true", help="fill gpu-wheels/ instead")
    args = parser.parse_args(argv)
    wanted = args.stages.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--stages: there is no stage {', '.join(unknown)}; stages are {', '.join(names)}")
    if args.wheels:
        fetch_wheels()
        return 0
    out = Path(os.environ.get("OUT", ROOT / "gpu-check-out"))
    out.mkdir(parents=True, exist_ok=True)
    results = check(Machine(out, args.model, args.limit_s), [stage for stage in STAGES if stage.name in wanted])
    sys.stdout.write(json.dumps(results) + "\n")
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
