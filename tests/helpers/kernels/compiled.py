"""Host functions of kernels on CPU tensors, whose kernels are compiled for a GPU that is not there.

So types, alignments and constants are those of a real launch. ``compiled(capability)`` collects what ptxas said of each. It starts none, or
runs what they compile to on this CPU.
"""

# pyright: reportIncompatibleMethodOverride=false

import contextlib
import io
import re
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from helpers.ptx.kernel import PtxKernel

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # that one program may have
_PROCESSORS = {80: 108, 86: 82, 89: 142, 90: 132}


class Compiled(NamedTuple):
    name: str
    shared_bytes: int
    spilled_bytes: int
    ptx: str


_ptx: dict[str, str] = {}  # by the kernel's hash


def _passed(kind: Any, argument: Any) -> Iterator[Any]:
    """What a launch passes of an argument of type ``kind``: no constants."""
    if isinstance(kind, tuple):
        for part in zip(kind, argument, strict=True):
            yield from _passed(*part)
    elif kind != "constexpr":
        yield argument


@contextlib.contextmanager
def compiled(capability: int, runs: bool = False) -> Iterator[list[Compiled]]:
    """Within it launches of CPU tensors compile for ``capability``; one result for each new variant of a kernel.

    ``runs``: they also do what they should, as ``helpers/ptx`` says.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    seeds = count()

    def launcher(source: Any, metadata: Any) -> Any:
        if not runs:
            return lambda *_: None
        kernel = PtxKernel(_ptx[metadata.hash], metadata.shared)

        def launch(num_programs: int, *given: Any) -> None:
            arguments = zip(source.signature.values(), given[-len(source.signature) :], strict=True)
            passed = [each for kind, argument in arguments for each in _passed(kind, argument)]
            kernel(num_programs, *passed, seed=next(seeds))

        return launch

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            sizes = {"max_shared_mem": SHARED_BYTES[capability], "multiprocessor_count": _PROCESSORS[capability]}
            return {**sizes, "max_num_regs": 65536, "warpSize": 32}

        def load_binary(self, *_: Any) -> tuple[Any, ...]:
            return object(), object(), 0, 0, 1024

    class Driver(DriverBase):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = Utils(), launcher

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return capability + 1000 * runs  # kernels are kept by device

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            return None

        def get_device_interface(self) -> Any:
            return None

    compile_one = JITFunction._do_compile

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel: Any = compile_one(self, *args, **kwargs)
        _ptx[kernel.hash] = kernel.asm["ptx"]
        spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
        assert spilled is not None, f"ptxas says nothing of spills: {log.getvalue()[:300]}"
        found.append(Compiled(self.fn.__name__, kernel.metadata.shared, int(spilled[1]), kernel.asm["ptx"]))
        return kernel

    before, active = knobs.nvidia.dump_ptxas_log, driver._active
    knobs.nvidia.dump_ptxas_log, JITFunction._do_compile = True, watched
    driver.set_active(Driver())
    try:
        yield found
    finally:
        knobs.nvidia.dump_ptxas_log, JITFunction._do_compile = before, compile_one
        driver._active = active
