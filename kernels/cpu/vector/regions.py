"""Kernels as parallel regions: what OpenMP calls on each thread is machine code, without Python and its lock.

A thread that came to Python first would have to wait for the lock of the one that started it: asleep, on a core that goes
idle meanwhile, and for longer than most kernels take.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from tightwire.kernels.cpu.vector.simd_ir import I64, Builder, Value

_NUMBA_TYPES = {int: types.int64, float: types.float64, bool: types.boolean}

# A job in memory: the next item, one behind the last, and items in a draw; then the kernel's arguments, 8 bytes each.
_NEXT, _STOP, _STEP, _ARGUMENTS = range(4)


def run_region(kernel: Any, arguments: Sequence[int | float], num_items: int, step: int, num_threads: int) -> None:
    """Call ``kernel`` on so many threads at once, this one among them, and return when no item is left.

    Each draws ``step`` of the items and calls ``kernel(*arguments, start, stop)``, or ``kernel(*arguments, start)`` if that
    is all it takes, until none is left.

    Raises:
        RuntimeError: torch was built without GNU's OpenMP or a library like it.

    Cost: some 5 us; ten times that after some idle milliseconds, when OpenMP has put its threads to sleep.
    """
    address, layout = _compile(kernel, len(arguments))
    job = ctypes.create_string_buffer(layout.pack(0, num_items, step, *arguments), layout.size)
    _parallel()(address, job, num_threads, 0)


@cache
def _parallel() -> Callable[..., None]:
    """OpenMP's entry for a region, of the library that torch has loaded: function, its argument, threads, flags."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        raise RuntimeError(
            f"this torch ({torch.__version__}) has no OpenMP that could run our kernels on {torch.get_num_threads()} "
            "threads; use a build with GNU's or Intel's, or one thread (OMP_NUM_THREADS=1)"
        ) from None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@cache
@global_compiler_lock
def _compile(kernel: Any, num_arguments: int) -> tuple[int, struct.Struct]:
    """Address of a function of a job's address, and the layout of the job. Some milliseconds, once in a process."""
    kinds = [kind for name, kind in kernel.py_func.__annotations__.items() if name != "return"]
    signature = tuple(_NUMBA_TYPES[kind] for kind in kinds)
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    context: Any = cpu_target.target_context
    callee = compiled.fndesc
    # Called by its address, for it is machine code already; what is linked in would be compiled once more.
    binding.add_symbol(callee.llvm_func_name, compiled.library.get_pointer_to_function(callee.llvm_func_name))
    name = f"region.{num_arguments}.{callee.llvm_func_name}"
    library = context.codegen().create_library(name)
    module = library.create_ir_module(name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), name)
    _write(
        function,
        kinds,
        num_arguments,
        lambda builder, values: context.call_conv.call_function(
            builder, context.declare_function(module, callee), callee.restype, signature, values
        ),
    )
    library.add_ir_module(module)
    library.finalize()
    layout = struct.Struct("3q" + "".join("d" if kind is float else "q" for kind in kinds[:num_arguments]))
    return library.get_pointer_to_function(name), layout


def _write(
    function: Any, kinds: Sequence[type], num_arguments: int, call: Callable[[Builder, list[Value]], object]
) -> None:
    """The body: load the arguments, then draw and call until no item is left."""
    entry, draw, body, end = (function.append_basic_block() for _ in range(4))
    builder = ir.IRBuilder(entry)
    (job,) = function.args

    def place(index: int) -> Value:
        return builder.gep(job, [I64(index)])

    arguments = []
    for index, kind in enumerate(kinds[:num_arguments], _ARGUMENTS):
        address = place(index)
        if kind is float:
            address = builder.bitcast(address, ir.DoubleType().as_pointer())
        value = builder.load(address)
        arguments.append(builder.trunc(value, ir.IntType(1)) if kind is bool else value)
    last, step = builder.load(place(_STOP)), builder.load(place(_STEP))
    builder.branch(draw)

    builder.position_at_end(draw)
    start = builder.atomic_rmw("add", place(_NEXT), step, "monotonic")
    builder.cbranch(builder.icmp_signed("<", start, last), body, end)

    builder.position_at_end(body)
    behind = builder.add(start, step)
    stop = builder.select(builder.icmp_signed("<", behind, last), behind, last)
    call(builder, [*arguments, start, stop][: len(kinds)])
    builder.branch(draw)

    builder.position_at_end(end)
    builder.ret_void()
