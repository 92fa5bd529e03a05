"""Gives every Python process whose path begins with this folder the emulated CUDA device, as soon as it imports torch."""

import ctypes
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_run_path = runpy.run_path


class _Torch(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torch" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from helpers.emulated import cuda

            cuda.install()

        spec.loader.exec_module = exec_module
        return spec


def _versions(path: str, *args: Any, **kwargs: Any) -> Any:
    """``cuda_devices.torch_has_cuda`` reads this file."""
    found = _run_path(path, *args, **kwargs)
    return {**found, "cuda": "13.0"} if path.endswith("torch/version.py") else found


class _Library(ctypes.CDLL):
    """``cuda_devices.has_driver`` opens the driver's library."""

    def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(None if name == "libcuda.so.1" else name, *args, **kwargs)


ctypes.CDLL = _Library
runpy.run_path = _versions
sys.meta_path.insert(0, _Torch())
