"""Counts what a step gives a device to do: bytes copied to it, and torch's operations on it."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided")
_COPIES = ("copy_", "_to_copy", "to")


class DeviceWork(TorchDispatchMode):
    """While it is entered it counts; replays of CUDA graphs and launches of Triton are not seen.

    ``copied_bytes``: of what is copied to ``device``, on a CPU between any tensors. ``operations``: on ``device``, copies
    included, views and allocations not; one is a kernel or a few.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self.copied_bytes, self.operations = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0] if args else None
        to_device = any(isinstance(each, Tensor) and each.device.type == self._type for each in tree_leaves(result))
        if name in _COPIES and to_device and isinstance(source, Tensor) and source.device.type == "cpu":
            self.copied_bytes += source.nbytes
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if name == "to":  # in inference mode, where operations come whole
            is_view = result is source
        if to_device and not is_view and name not in _ALLOCATE:
            self.operations[name] += 1
        return result
