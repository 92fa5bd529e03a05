"""Words that processes or threads watch each other by, for CPU kernels: ordered loads and stores, giving way, the time.

What a thread wrote before ``store_release`` is seen by whoever reads that number with ``load_acquire``, and what it read
before, it read before any of them writes over it: on every CPU, ARM too, whether the bytes were moved by compiled code
or by a library. The same two hold LLVM to that order. Addresses are those of aligned 64-bit words.
"""

import ctypes
import sys
import time
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tightwire.kernels.cpu.vector.simd_ir import I32, I64, Builder, Value

_PR_SET_TIMERSLACK = 29


def _load_acquire(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


def _store_release(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _yield_core(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _nap(typingctx: Any, microseconds: Any) -> Any:
    def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [I32]), "usleep")
        builder.call(function, [builder.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _clock_ns(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
        seconds_and_ns = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        first = builder.bitcast(seconds_and_ns, I64.as_pointer())
        kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(I32, time.CLOCK_MONOTONIC), first])
        second = builder.gep(first, [ir.Constant(I32, 1)])
        return builder.add(builder.mul(builder.load(first), ir.Constant(I64, 1_000_000_000)), builder.load(second))

    return types.int64(), codegen


# (address): the int64 there; nothing that follows is read or written before it.
load_acquire: Any = intrinsic(_load_acquire)
# (address, value): write an int64; all that came before has been read and written by then.
store_release: Any = intrinsic(_store_release)
# (): let another thread have this core if one wants it; about half a microsecond when none does.
yield_core: Any = intrinsic(_yield_core)
# (microseconds): sleep; Linux adds 50 us to it unless the thread has asked for less (``wake_on_time``).
nap: Any = intrinsic(_nap)
# (): nanoseconds on the clock of ``time.perf_counter`` (Linux); some 30 ns, and no system call.
clock_ns: Any = intrinsic(_clock_ns)


def wake_on_time() -> None:
    """Let the calling thread's sleeps end within some microseconds of their time instead of 50 us later (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
