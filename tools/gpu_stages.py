"""The stages of ``gpu_check.py`` in the order of their worth, and the figures that are asked of a GPU."""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpu_machine import NOTHING, ROOT, SITE, TIGHTWIRE, CommandError, LeftOutError, Machine, Stage
from gpu_sizes import TINY

_BENCH = (*TIGHTWIRE, "bench")
_CUDA = ("--device", "cuda")
_BUILD = "from tightwire.kernels.cpu import library; print(library.level())"
_MOST_WORKERS = 14  # of pytest; each has a context on the GPU
_SANITIZED = "test_norm or packed_product and Q8_0 or prompts_of_packed and Q4_K or references_bytes and int4"


def program(
    machine: Machine, name: str, options: Mapping[str, Any] = NOTHING, environment: Mapping[str, str] = NOTHING
) -> Any:
    command = sys.executable, "tools/gpu_programs.py", name, json.dumps(options)
    return machine.figures(*command, environment=environment)


def bench(machine: Machine, *arguments: str) -> Any:
    return machine.figures(*_BENCH, *arguments, "--json")


def tiny(machine: Machine) -> str:
    """The folder of the tiny model, made when it is first needed, as is the configuration of 70 billion parameters."""
    if not (ROOT / TINY / "model.safetensors").exists():
        machine.run((sys.executable, "tools/gpu_programs.py", "models"))
    return TINY


def facts(machine: Machine) -> Any:
    tiny(machine)
    found = program(machine, "facts")
    machine.devices = found["devices"]
    return found


def two_devices(machine: Machine) -> None:
    if len(machine.devices or facts(machine)["devices"]) < 2:
        raise LeftOutError("it needs two devices")


def roofline(machine: Machine) -> Any:
    """Decode and prefill, over HTTP and by parts; without transformers, which have a stage of their own."""
    return bench(machine, "lab", "roofline", machine.sizes.model, *_CUDA, "--no-peer", *machine.sizes.roofline)


def load(machine: Machine, model: str, sizes: tuple[str, ...], *options: str) -> Any:
    """Load on a server of ``model``."""
    with machine.serving(model, *_CUDA, *options, *machine.sizes.serve) as url:
        return bench(machine, "serve", "--url", url, *sizes, "--warmups", machine.sizes.warmups)


def int4(machine: Machine) -> Any:
    """The load of a token in the roofline, with weights in 4 bits."""
    options = "--quantization", "int4", "--max-num-seqs", "8", "--prefix-cache", "none", "--dtype", "bfloat16"
    return load(machine, machine.sizes.model, machine.sizes.one, *options)


def served(*options: str) -> Callable[[Machine], Any]:
    return lambda machine: load(machine, machine.sizes.model, machine.sizes.loads, *options)


def stream(machine: Machine) -> Any:
    """Steps with layers from pinned memory, and the rate of a copy from it."""
    copies = machine.run((sys.executable, "-m", "tightwire.server.plan.gpu_copies", "1"), into=SITE / "copies.json")
    rate = {"copy_bytes_per_s": json.loads(copies.splitlines()[-1])[0]}
    try:
        return {**_streamed(machine, machine.sizes.model, *machine.sizes.layers), **rate}
    except CommandError as error:  # the rate is also that of 70B's
        error.figures = {**(error.figures or {}), **rate}
        raise


def stream_70b(machine: Machine) -> Any:
    tiny(machine)
    return _streamed(machine, machine.sizes.model_70b, "--quantization", "int4")


def _streamed(machine: Machine, model: str, *options: str) -> Any:
    where = (*_CUDA, "--sources", "host", "--codecs", "none", "--tp", "1")
    return bench(machine, "stream", model, *where, *machine.sizes.stream, *options)


def transformers(machine: Machine) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise LeftOutError("transformers is not installed")
    # On the emulated device nothing is compiled.
    return program(machine, "transformers", machine.sizes.transformers, machine.sizes.uncompiled)


def tests(name: str, *files: str, workers: bool = True, limit_s: float = 200) -> Stage:
    """A stage that runs files of tests and counts what passed, also when its time is over."""

    def run(machine: Machine) -> dict[str, int]:
        command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-p", "no:benchmark", "-m", "gpu or multi_gpu"]
        if workers and not machine.sizes.tests and importlib.util.find_spec("xdist"):
            command += ["-n", str(min(_MOST_WORKERS, os.cpu_count() or 1))]
        chosen = machine.sizes.tests.get(name, "")
        if chosen is None:
            raise LeftOutError("its cases take minutes on the emulated device")
        command += ["-k", chosen] if chosen else []
        try:
            return _counts(machine.run([*command, *(f"tests/{file}.py" for file in files)]))
        except CommandError as error:
            error.figures = _counts(error.output)
            raise

    return Stage(name, run, limit_s)


def decode(machine: Machine) -> Any:
    """The first tests with kernels. If they pass only where none starts while another ends, later stages start none either."""
    try:
        return _DECODE.run(machine)
    except CommandError as error:
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", error.output, re.MULTILINE)
        if not failed:  # its time was over
            raise
        apart = {"TIGHTWIRE_OVERLAP": "0"}
        again = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *failed
        try:
            machine.run(again, environment=apart)
        except CommandError:
            raise error from None
        machine.environment |= apart
        message = "they pass with TIGHTWIRE_OVERLAP=0, which later stages have; give it to --go-on"
        raise CommandError(message, error.output, error.figures) from None


def _counts(output: str) -> dict[str, int]:
    found = re.findall(r"^(?:\[gw\d+\] \[|tests/.*::).* (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    return {word.lower(): found.count(word) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}


def answers(*ways: tuple[str, ...]) -> Callable[[Machine], dict[str, str]]:
    """Greedy answers of the tiny model in ``ways``, which must be equal."""

    def run(machine: Machine) -> dict[str, str]:
        sizes = "--max-tokens", "8", "--max-num-seqs", "1", "--max-model-len", "64"  # few graphs: each is captured
        common = *TIGHTWIRE, "generate", "--model", tiny(machine), "--dtype", "float32", *sizes
        printed = SITE / "answer.txt"
        found = {" ".join(way): machine.run((*common, *way, "The wire is long"), into=printed) for way in ways}
        if len(set(found.values())) > 1:
            raise CommandError(f"answers differ: {found}", figures=found)
        return found

    return run


def train(machine: Machine) -> Any:
    """Training steps, and those of torch's FSDP2."""
    folder = SITE / "train"
    shutil.rmtree(folder, ignore_errors=True)  # a run goes on where it stopped
    fixed = "device=cuda", f"run={folder}", "schedule.warmup_steps=0", "evaluation.every=0", "checkpoint.every=0"
    own = "model.compute_dtype=bfloat16", *machine.sizes.train
    machine.run((*TIGHTWIRE, "train", "pretrain-10m", *fixed, *own))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
    figures = {"tokens_per_s": rates[len(rates) // 2]}
    try:
        return {**figures, "fsdp2": program(machine, "fsdp2", machine.sizes.fsdp2)["tokens_per_s"]}
    except CommandError as error:
        raise CommandError(f"FSDP2: {error}", figures=figures) from None


def doctor(machine: Machine) -> Any:
    try:
        report = machine.figures(*TIGHTWIRE, "doctor", "--json")
    except CommandError as error:
        if error.figures is None:
            raise
        report = error.figures  # it found a problem, which is in the advice
    if reason := report["speed"].get("reason"):
        raise LeftOutError(f"the speed of its model: {reason}", report)
    return report


def sanitizer(machine: Machine) -> Any:
    if shutil.which("compute-sanitizer") is None:
        raise LeftOutError("compute-sanitizer is not installed")
    checked = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", _SANITIZED
    files = "tests/gpu/test_layer_kernels.py", "tests/gpu/test_block_quant.py"
    memcheck = "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # in torch's pools of many MiB the end of a tensor is not seen
    output = machine.run((*memcheck, *checked, *files), environment=apart)
    return [line for line in output.splitlines() if "ERROR SUMMARY" in line or " passed" in line]


def sums(transport: str) -> Callable[[Machine], Any]:
    """AllReduces between two GPUs; fails where the transport does not work."""

    def run(machine: Machine) -> Any:
        two_devices(machine)
        return bench(machine, "comm", *_CUDA, "--transport", transport, *machine.sizes.comm)

    return run


def of_two(run: Callable[[Machine], Any]) -> Callable[[Machine], Any]:
    def on_two(machine: Machine) -> Any:
        two_devices(machine)
        return run(machine)

    return on_two


_DECODE = tests("tests of decode", "gpu/test_decode_graphs")
STAGES = (
    Stage("facts", facts, 60),
    # Before tests, whose other side is the CPU's.
    Stage("build", lambda machine: machine.run((sys.executable, "-c", _BUILD)).split()[-1], 120),
    Stage("tests of decode", decode, 120),
    Stage("decode and prefill", roofline, 200),
    Stage("codecs", lambda machine: bench(machine, "kernels", *_CUDA, *machine.sizes.kernels), 160),
    Stage("packed products", lambda machine: program(machine, "products", machine.sizes.products), 120),
    Stage("int4", int4, 170),
    Stage("stream", stream, 120),
    Stage("transformers", transformers, 150),
    Stage("stream 70B", stream_70b, 150),
    tests("tests of kernels", "gpu/test_layer_kernels", "gpu/test_block_quant", "gpu/test_packed_model"),
    Stage("train", train, 120),
    tests("tests of models", "gpu/test_stages", "gpu/test_partition", "gpu/test_drafts"),
    Stage("sums over peer memory", sums("peer-memory"), 120),
    Stage("sums over NCCL", sums("process-group"), 120),
    Stage(
        "answers",
        answers((*_CUDA,), (*_CUDA, "--no-cuda-graphs"), (*_CUDA, "--plan-ahead", "off"), ("--device", "cpu")),
        120,
    ),
    Stage("answers of two", of_two(answers((*_CUDA, "--tp", "1"), (*_CUDA, "--tp", "2"))), 100),
    Stage("serve of two", of_two(served("--tp", "2")), 150),
    Stage("serve", served(), 150),
    tests(
        "tests of the rest",
        *("gpu/test_rules", "gpu/test_attention", "gpu/test_decode_waits"),
        *("gpu/test_decode_work", "gpu/test_training", "gpu/test_offloaded_cache", "model/sampling/test_sampler"),
        *("kernels/test_attention", "comm/transport/test_peer_access", "model/checkpoint/test_random"),
        "bench/doctor/test_gpus",
    ),
    tests("tests of peers", "gpu/test_peer_memory", workers=False),
    Stage("doctor", doctor, 90),
    Stage("eager", served("--no-cuda-graphs"), 120),
    Stage("one by one", served("--plan-ahead", "off"), 120),
    Stage("sanitizer", sanitizer, 150),
)


def asked(stages: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of a GPU and what was measured: None where it was not. ``met`` None: nothing is asked, or it was not measured."""
    found = {name: stage.get("figures") for name, stage in stages.items()}
    rows = []
    for figure, (low, high), measure in _ASKED:
        try:
            measured = float(measure(found))
        except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError):
            measured = None
        met = None if measured is None or low == high else low <= measured <= high
        rows.append({"figure": figure, "asked": _bounds(low, high), "measured": measured, "met": met})
    return rows


def _bounds(low: float, high: float) -> str:
    return "" if low == high else f"at least {low:g}" if low else f"at most {high:g}"


def _cell(found: Any, name: str) -> Any:
    return next(cell for cell in found["decode and prefill"]["cells"] if cell["name"].startswith(name))


def _token_s(served: Any) -> float:
    """Seconds of a token of one request."""
    return served["cells"][0]["tpot_s"]["p50"]


def _streaming(found: Any, stage: str) -> float:
    cell = found[stage]["cells"][0]
    return cell["bytes_per_step"] / cell["step_s"] / found["stream"]["copy_bytes_per_s"]


_TOKEN, _PROMPT = "a generated token, one request", "first token of"
_ANY = (0.0, 0.0)
_OPERATIONS = ("encode", "decode", "decode-add", "decode-reduce-encode")


def _asked() -> Iterator[tuple[str, tuple[float, float], Callable[[Any], float]]]:
    inf = float("inf")
    yield "decode, share of the copy rate", (0.8, inf), lambda found: _cell(found, _TOKEN)["share"]
    yield "prompt of 8k, share of the product rate", (0.55, inf), lambda found: _cell(found, _PROMPT)["share"]
    for each in _OPERATIONS:
        yield (
            f"{each}, least of all codecs, share of the copy rate",
            (0.8, inf),
            lambda found, each=each: min(
                cell["share_of_copy"] for cell in found["codecs"]["cells"] if cell["operation"] == each
            ),
        )
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K"):
        yield (
            f"products with one row, {name}, of bfloat16's time",
            (0.0, 0.5),
            lambda found, name=name: found["packed products"]["of_bfloat16"][name],
        )
    yield (
        "int4 decode, of bfloat16's time",
        (0.0, 0.5),
        lambda found: _token_s(found["int4"]) / _cell(found, _TOKEN)["seconds"],
    )
    yield "streamed step, share of pinned copies", (0.9, inf), lambda found: _streaming(found, "stream")
    yield "streamed 70B int4, share of pinned copies", (0.9, inf), lambda found: _streaming(found, "stream 70B")
    yield (
        "decode, times as fast as transformers",
        _ANY,
        lambda found: found["transformers"]["token_s"] / _cell(found, _TOKEN)["seconds"],
    )
    yield (
        "prompt of 8k, times as fast as transformers",
        _ANY,
        lambda found: found["transformers"]["prompt_s"] / _cell(found, _PROMPT)["seconds"],
    )
    for name, how in (("eager", "graphs"), ("one by one", "planning ahead")):
        yield (
            f"decode, times as fast by {how}",
            _ANY,
            lambda found, name=name: _token_s(found[name]) / _token_s(found["serve"]),
        )
    yield (
        "training, times as fast as FSDP2",
        _ANY,
        lambda found: found["train"]["tokens_per_s"] / found["train"]["fsdp2"],
    )


_ASKED = tuple(_asked())
