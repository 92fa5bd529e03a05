"""Finds CUDA devices that work, without torch here, which imports slowly.

``python -m tightwire.cuda_devices`` tries them: a line of JSON for each that ranks can use.
"""

import ctypes
import importlib.util
import logging
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from json import dumps, loads
from pathlib import Path
from typing import NamedTuple

# Lines that torch adds to CUDA's errors.
_ADVICE = "Search for ", "CUDA kernel errors might ", "For debugging consider ", "Compile with "
_CHILD, _LIMIT_S = (sys.executable, "-m", __name__), 120.0


class CudaDevice(NamedTuple):
    name: str
    total_bytes: int
    free_bytes: int


def torch_has_cuda() -> bool:
    """True if the installed torch is a CUDA build. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    return version.exists() and runpy.run_path(str(version)).get("cuda") is not None


def has_driver() -> bool:
    """True if this machine has NVIDIA's driver. A CUDA build of torch, which pip takes by default, runs without one too."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def why_no_launch() -> str:
    """Why Triton cannot launch kernels, or empty. It compiles a launcher in C for each kernel at its first launch."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; python -m pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler at run time; install gcc, or set CC"
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    return "" if header.exists() else f"Triton needs {header} at run time; install python3-dev"


@cache
def cuda_devices() -> tuple[Sequence[CudaDevice], str]:
    """The CUDA devices that ranks can use, in their order, and why there are no more, or empty; a child tries them."""
    if not torch_has_cuda():
        return (), "this torch is built without CUDA"
    if reason := why_no_launch() if has_driver() else "this machine has no NVIDIA driver (libcuda.so.1)":
        return (), reason
    printed, reason = run_child(_CHILD)
    if reason:
        logging.getLogger(__name__).warning("CUDA devices are not used: %s", reason)
    return tuple(CudaDevice(*loads(line)) for line in printed.splitlines()), reason


def run_child(command: Sequence[str]) -> tuple[str, str]:
    """What a program that uses CUDA prints, and why it failed, or empty. This process would keep the memory that CUDA takes."""
    try:
        env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as ranks have it
        child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LIMIT_S, env=env)
    except subprocess.TimeoutExpired:
        return "", f"CUDA did not answer within {_LIMIT_S:g} s"
    said = [line for line in child.stderr.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return child.stdout, (said or [f"its probe ended with {child.returncode}"])[-1] if child.returncode else ""


def on_gpu(asked: str) -> bool:
    """True if ranks with ``--device asked`` will use GPUs. Torch takes seconds to find them, which is shown."""
    if asked != "auto" or not torch_has_cuda() or not has_driver():
        return asked == "cuda"
    sys.stderr.write("looking for GPUs, usually 3 to 8 s\n")
    return bool(cuda_devices()[0])


if __name__ == "__main__":
    import torch

    torch.cuda.init()  # raises where the driver is too old
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if major < 8:  # no bfloat16, and not the shared memory that attention of prompts takes
            raise SystemExit(f"{name} has compute capability {major}.{minor}; 8.0 is needed")
        torch.ones(1, device=f"cuda:{index}").add_(1).item()  # raises where torch has no kernels for the device
        sys.stdout.write(dumps([name, *reversed(torch.cuda.mem_get_info(index))]) + "\n")
        sys.stdout.flush()
