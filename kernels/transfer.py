"""Asynchronous copies between host and device; the source may be released at once, as torch keeps pinned memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``numbers`` (an array or nested lists) to a tensor on ``device``."""
    host = torch.tensor(numbers, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def overwrite(target: Tensor, host: Tensor) -> None:
    """Copy ``host`` into ``target`` of the same size. The caller may overwrite ``host`` after the call."""
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


class Download:
    """An asynchronous copy of tensors to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies, which run after all work queued on the device so far."""
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            tensors = [
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()
        self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
