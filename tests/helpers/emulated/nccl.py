"""NCCL between emulated CUDA devices: gloo on the numbers of their tensors, on the loopback interface, replayed with a graph."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from helpers.emulated import cuda
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class _Options:
    _timeout = timedelta(minutes=5)


class ProcessGroupNccl:
    """What ``NcclTransport`` calls; a call ends when all ranks have made it, where NCCL's is only queued."""

    Options = _Options

    def __init__(self, store: Any, rank: int, world_size: int, options: _Options) -> None:
        gloo: Any = dist.ProcessGroupGloo
        own = gloo._Options()
        own._timeout, own._threads, own._devices = options._timeout, 1, [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(store, rank, world_size, own)

    def abort(self) -> None:
        self._group = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> "_Done":
            if any(isinstance(each, Tensor) and not isinstance(each, cuda.CudaTensor) for each in tree_leaves(args)):
                raise RuntimeError(f"No backend type associated with device type cpu: {name}")
            hosts = tree_map(cuda.host_of, args)

            def run() -> None:
                getattr(self._group, name)(*hosts).wait()

            run()
            cuda.also_replayed(run)
            return _Done()

        return call


class _Done:
    def wait(self) -> None:
        pass
