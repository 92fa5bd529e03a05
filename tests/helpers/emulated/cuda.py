"""A CUDA device emulated in a CPU build of torch: its tensors are the host's, its rules are CUDA's.

After ``install()`` tensors of ``cuda:0`` are ``CudaTensor``s, wrappers of host tensors. Work runs at once, in Triton's
interpreter or as torch's CPU operations. Mixing devices is an error; what makes the host wait for the device is counted
in ``waits``, and refused during the capture of a graph, as are copies of pageable memory. Streams and events do nothing, so
races between streams, the memory order of hardware, and speed do not show.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false

import contextlib
import ctypes
import functools
import math
import mmap
import os
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME, MEMORY_BYTES = "Emulated H100", 8 << 30
num_devices = int(os.environ.get("EMULATED_CUDA_DEVICES", "1"))
waits: Counter[str] = Counter()  # of the host for the device, by what was called and where
_pinned: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address
_registered: dict[int, int] = {}  # address -> bytes of memory that was pinned where it lies
_here = threading.local()  # device, stream
_captured: list[Callable[[], object]] | None = None
_refuses_waits = False
_interpreter = threading.RLock()
_random_states = [torch.Generator().manual_seed(0).get_state() for _ in range(num_devices)]

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.is_nonzero, _aten._unique2}
_COPIES = {_aten.copy_, _aten._to_copy}
_TAKES_HOST_INDEX = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class CudaTensor(Tensor):
    """``host`` has the numbers of this tensor of ``cuda:number``. For torch's own code it is on the meta device."""

    host: Tensor
    number: int  # of the device

    @staticmethod
    def __new__(cls: Any, host: Tensor, number: int) -> Any:
        places = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        with torch.inference_mode(host.is_inference()):  # views of other tensors are none
            self = Tensor._make_wrapper_subclass(cls, host.shape, **places, dtype=host.dtype, device="meta")  # pyright: ignore
        self.host, self.number = host, number
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)

    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)
    data = property(lambda self: self.detach(), lambda self, value: self.detach().copy_(value))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):  # torch would make it on the meta device
            value = CudaTensor(torch.tensor(value, dtype=self.dtype), self.number)
        super().__setitem__(index, value)

    def get_device(self) -> int:
        return self.number

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def cpu(self, *_: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = None, **_: Any) -> Tensor:
        return self.to(torch.device("cuda", _index(device)))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copies = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else torch.device(device)
        if not copies and device.type == "cuda" and _index(device) == self.number and dtype in (None, self.dtype):
            return self
        return _aten._to_copy(self, dtype=dtype or self.dtype, device=device, non_blocking=non_blocking)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError(f"cannot pin '{self.dtype}' only dense CPU tensors can be pinned")

    def __repr__(self, **_: Any) -> str:
        return f"{self.host!r} on {self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CudaTensor, (self.host, self.number)


def host_of(value: Any) -> Any:
    return value.host if isinstance(value, CudaTensor) else value


def _on_host(value: Any) -> Any:
    """``host_of``; also of a device that torch's own code asked a tensor for, as ``torch.as_tensor`` does."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else host_of(value)


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    index = getattr(_here, "device", 0) if index is None else index
    if not 0 <= index < num_devices:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
    return index


def _wait(what: str) -> None:
    """Count a wait of the host, or refuse it during a capture."""
    if _captured is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
    if _refuses_waits:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    own = [frame for frame in traceback.extract_stack() if "/emulated/" not in frame.filename]
    place = next((frame for frame in reversed(own) if "/torch/" not in frame.filename), own[-1])
    waits[f"{what} at {place.filename.rpartition('/tightwire/')[2]}:{place.lineno}"] += 1


def _is_pinned(host: Tensor) -> bool:
    at = host.data_ptr()
    found = [(ref.key, ref()) for ref in _pinned.valuerefs()]  # pyright: ignore[reportAttributeAccessIssue]
    sizes = [*tuple(_registered.items()), *((start, len(mapped)) for start, mapped in found if mapped is not None)]
    return any(start <= at < start + length for start, length in sizes)


def _pinned_like(host: Tensor) -> Tensor:
    mapped = mmap.mmap(-1, max(1, host.nbytes))
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    _pinned[memory.data_ptr()] = mapped
    return memory[: host.nbytes].view(host.dtype).view(host.shape)


class _Everywhere(TorchDispatchMode):
    """Sees also operations without a ``CudaTensor``, because they may make one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []
    tree_map(lambda each: tensors.append(each) if isinstance(each, Tensor) else None, (args, kwargs))
    own = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":  # code of torch that asked a tensor for its device
        device = torch.device("cuda", _index())
    to_cuda = device is not None and torch.device(device).type == "cuda"
    if kwargs.pop("pin_memory", False):
        if to_cuda:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return _pinned_like(func(*args, **kwargs))
    if not own and not to_cuda:
        return func(*args, **kwargs)
    index = _index(device) if to_cuda else own[0].number
    packet = func.overloadpacket
    _check(packet, args, kwargs, own, [each for each in tensors if each.dim() and not isinstance(each, CudaTensor)])
    if packet in _READS:
        _wait(str(packet))
    to_host = device is not None and not to_cuda
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if to_host:
        kwargs["device"] = device
    host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if func is _aten.mm.dtype:  # only CUDA has it
        func = _product
    with _random_numbers_of(index) if draws else contextlib.nullcontext():
        outputs = func(*host_args, **host_kwargs)
    if packet is _aten._to_copy and outputs.data_ptr() == host_args[0].data_ptr():
        outputs = outputs.clone()
    outers = {id(tensor.host): tensor for tensor in own}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or to_host:
            return value
        known = outers.get(id(value))
        if known is None and packet is _aten.copy_ and value is args[0]:
            return value  # a copy to the host
        if value.is_meta:
            raise AssertionError(f"{func} gave numbers of the meta device")
        return CudaTensor(value, index) if known is None else known

    also_replayed(functools.partial(_replay, func, host_args, host_kwargs, outputs))
    return tree_map(wrapped, outputs)


@contextlib.contextmanager
def _random_numbers_of(index: int) -> Iterator[None]:
    """Draw those of an operation without a generator from the device's own."""
    before = torch.get_rng_state()
    torch.set_rng_state(_random_states[index])
    try:
        yield
    finally:
        _random_states[index] = torch.get_rng_state()
        torch.set_rng_state(before)


def _seed(seed: int) -> None:
    for index in range(num_devices):
        _random_states[index] = torch.Generator().manual_seed(seed).get_state()


def also_replayed(run: Callable[[], object]) -> None:
    """Have the graph that is being captured, if one is, do ``run`` too."""
    if _captured is not None:
        _captured.append(run)


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)


def _check(packet: Any, args: Any, kwargs: dict[str, Any], own: list[CudaTensor], on_host: list[Tensor]) -> None:
    """Raise what CUDA raises about devices and captures, and count waits of copies between device and host."""
    if packet in _COPIES:
        host = next(iter(on_host), None)
        to_host = packet is _aten._to_copy and bool(own) and kwargs.get("device", own[0].device).type != "cuda"
        blocks = not (kwargs.get("non_blocking") or (packet is _aten.copy_ and len(args) > 2 and args[2]))
        if not args[0].numel():
            return
        if host is not None and (blocks or not _is_pinned(host)):
            _wait(f"copy of {host.nbytes} B {'that blocks' if blocks else 'of pageable memory'}")
        elif to_host and blocks:
            _wait("copy to the host")
        return
    if not own:
        return
    if len({tensor.number for tensor in own}) > 1 or (on_host and packet not in _TAKES_HOST_INDEX):
        devices = " and ".join(sorted({*(str(each.device) for each in own), *("cpu" for _ in on_host)}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {packet}")
    if on_host:
        _wait(f"{packet} with an index on the host")


def _replay(func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Run a captured operation again, into the memory of its first outputs."""

    def store(old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)

    new = func(*args, **kwargs)
    many = isinstance(outputs, (tuple, list))
    for pair in zip(outputs, new, strict=True) if many else [(outputs, new)]:
        store(*pair)


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        if _captured is not None:
            _wait("event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Stream:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", _index(device)), id(self)

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        _wait("stream.synchronize")


class _Device(contextlib.ContextDecorator):
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before, _here.device = _index(), self._index

    def __exit__(self, *_: object) -> None:
        _here.device = self._before


class _Graph:
    def __init__(self, **_: Any) -> None:
        self.work: list[Callable[[], object]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for again in self.work:
            again()


@contextlib.contextmanager
def _capture(graph: _Graph, **_: Any) -> Iterator[None]:
    global _captured
    assert _captured is None, "a graph is being captured"
    _captured = graph.work
    try:
        yield
    finally:
        _captured = None


@contextlib.contextmanager
def _use_stream(stream: Any) -> Iterator[Any]:
    before, _here.stream = getattr(_here, "stream", None), stream
    try:
        yield stream
    finally:
        _here.stream = before


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name=NAME, multi_processor_count=2, uuid=f"GPU-{_index(device)}", total_memory=MEMORY_BYTES, major=9, minor=0
    )


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Self:
        return super().__new__(cls)


class _Runtime:
    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        _registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del _registered[address]
        return 0


def _no_handles(tensor: Tensor) -> Any:
    raise NotImplementedError("an emulated device has no memory for other processes")


def _set_sync_debug_mode(mode: str) -> None:
    global _refuses_waits
    _refuses_waits = mode == "error"


def _record_stream(self: Tensor, stream: Any) -> None:
    if not isinstance(self, CudaTensor):
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend")


def _idle() -> Callable[..., None]:
    """A new function each time: torch's compiler keeps a table of functions."""
    return lambda *_, **__: None


def install() -> None:
    """Emulate CUDA from here on in this process, which must not have imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name, value in {
        "_lazy_init": _idle(),
        "init": _idle(),
        "is_available": lambda: True,
        "_initialized": True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": _index,
        "set_device": lambda device: setattr(_here, "device", _index(device)),
        "device": _Device,
        "Stream": _Stream,
        "Event": _Event,
        "stream": _use_stream,
        "current_stream": lambda device=None: getattr(_here, "stream", None) or _Stream(device),
        "default_stream": lambda device=None: _Stream(device),
        "CUDAGraph": _Graph,
        "graph": _capture,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda device=None: _wait("synchronize"),
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "can_device_access_peer": lambda device, peer: True,
        "is_current_stream_capturing": lambda: _captured is not None,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": _idle(),
        "empty_cache": _idle(),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "get_rng_state": lambda device="cuda": _random_states[_index(device)].clone(),
        "set_rng_state": lambda state, device="cuda": _random_states.__setitem__(_index(device), state.clone()),
        "cudart": _Runtime,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "check_error": _idle(),
    }.items():
        setattr(torch.cuda, name, value)
    # Optimizers ask for its stream, which a CUDA build of torch takes from the driver.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    to = torch.Tensor.to

    def to_device(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(isinstance(each, (str, torch.device, CudaTensor)) for each in (*args, *kwargs.values())):
            copies = kwargs.pop("copy", False)
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
            if device is not None and device.type == "cuda":  # torch would look for the driver to give it an index
                device = torch.device("cuda", _index(device))
            return to(self, device=device, dtype=dtype, non_blocking=non_blocking, copy=copies)
        return to(self, *args, **kwargs)

    torch.Tensor.to = to_device  # pyright: ignore
    torch.Tensor.cuda = lambda self, device=None: self.to(torch.device("cuda", _index(device)))  # pyright: ignore
    torch.Tensor.pin_memory = lambda self, device=None: _pinned_like(self).copy_(self)  # pyright: ignore
    torch.Tensor.is_pinned = lambda self, device=None: _is_pinned(self)  # pyright: ignore
    torch.Tensor.record_stream = _record_stream  # pyright: ignore
    torch.cuda.nccl.version = lambda: (2, 29)
    torch.multiprocessing.reductions.reduce_tensor = _no_handles
    from helpers.emulated.nccl import ProcessGroupNccl

    torch.distributed.ProcessGroupNCCL = ProcessGroupNccl
    torch.Generator = _Generator  # pyright: ignore
    make = torch.tensor
    torch.tensor = lambda data, *, device=None, **kwargs: make(data, **kwargs).to(device or "cpu")  # pyright: ignore
    as_tensor = torch.as_tensor

    def at_address(data: Any, **kwargs: Any) -> Tensor:
        interface = None if isinstance(data, Tensor) else getattr(data, "__cuda_array_interface__", None)
        return as_tensor(data, **kwargs) if interface is None else _memory_at(interface)

    torch.as_tensor = at_address
    _interpret()
    run = threading.Thread.run

    def run_emulated(self: threading.Thread) -> None:
        with _Everywhere():
            run(self)

    threading.Thread.run = run_emulated  # pyright: ignore
    _Everywhere().__enter__()


def _memory_at(interface: dict[str, Any]) -> CudaTensor:
    """The bytes at an address of the device. A graph's work keeps the memory of its results."""
    memory = (ctypes.c_uint8 * math.prod(interface["shape"])).from_address(interface["data"][0])
    return CudaTensor(torch.frombuffer(memory, dtype=torch.uint8).view(interface["shape"]), _index())


def _interpret() -> None:
    """Triton's interpreter takes the host tensors, and its calls are captured."""
    from helpers.kernels.program_order import permute_interpreted_programs
    from helpers.kernels.quick_interpreter import quicken_interpreter
    from triton.runtime.interpreter import GridExecutor

    permute_interpreted_programs()
    quicken_interpreter()
    interpreted = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        for each in args:
            if isinstance(each, Tensor) and not isinstance(each, CudaTensor) and not _is_pinned(each):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        def run() -> None:
            with _interpreter, torch.utils._python_dispatch._disable_current_modes():
                interpreted(self, *tree_map(host_of, args), **tree_map(host_of, kwargs))

        run()
        also_replayed(run)

    GridExecutor.__call__ = call
