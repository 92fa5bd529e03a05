"""Counts the bytes of live tensors while code runs."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside ``with``, in this thread and in backward of CPU and meta tensors.

    Tensors made before are not counted, nor the kernels' own working memory: a dispatch mode sees only results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0  # bytes
        self._known: dict[int, weakref.ref[Any]] = {}

    def start_anew(self) -> None:
        """Restart ``most`` from the bytes that are live now."""
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def forget(reference: weakref.ref[Any]) -> None:
            self.now -= num_bytes
            if self._known.get(key) is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.most = max(self.most, self.now)
