"""Words that processes or threads watch each other by, for CPU kernels: ordered loads and stores, and giving way.

What a thread wrote before ``store_release`` is seen by whoever reads that number with ``load_acquire``, and what it read
before, it read before any of them writes over it: on every CPU, ARM too, whether the bytes were moved by compiled code
or by a library. The same two hold LLVM to that order. Addresses are those of aligned 64-bit words.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The int64 at ``address``; nothing that follows is read or written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64; all that came before has been read and written by then."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def yield_core(typingctx: Any) -> Any:
    """Let another thread have this core if one wants it: ``sched_yield``, about 0.3 us when none does."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
