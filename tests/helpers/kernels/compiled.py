"""Host functions of kernels on CPU tensors, whose kernels are compiled for a GPU that is not there.

So types, alignments and constants are those of a real launch, and Triton's own launchers take the arguments (``libcuda``).
``compiled(capability)`` collects what ptxas said of each. It starts none, or runs what they compile to on this CPU.
"""

# pyright: reportIncompatibleMethodOverride=false

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from helpers.kernels.libcuda import launchers
from helpers.ptx.kernel import PtxKernel

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # that one program may have
_PROCESSORS = {80: 108, 86: 82, 89: 142, 90: 132}


class Compiled(NamedTuple):
    name: str
    shared_bytes: int
    spilled_bytes: int
    ptx: str


_ptx: dict[str, str] = {}  # by the kernel's hash


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors among a launch's arguments."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(part)


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

    own = launchers()

    def launcher(source: Any, metadata: Any) -> Any:
        native = own.launcher(source, metadata)
        kernel = PtxKernel(_ptx[metadata.hash], metadata.shared) if runs else None

        def launch(*given: Any) -> None:
            def run(num_programs: int, parameters: Sequence[int]) -> None:
                if kernel is not None:
                    kernel(num_programs, [*_tensors(given)], parameters, seed=next(seeds))

            own.launch(native, run, given)

        return launch

    class Utils:
        def __getattr__(self, name: str) -> Any:
            return getattr(own.utils, name)

        def get_device_properties(self, device: int) -> dict[str, int]:
            sizes = {"max_shared_mem": SHARED_BYTES[capability], "multiprocessor_count": _PROCESSORS[capability]}
            return {**sizes, "max_num_regs": 65536, "warpSize": 32}

        def load_binary(self, *_: Any) -> tuple[int, ...]:
            return 0, 0, 0, 0, 1024

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
