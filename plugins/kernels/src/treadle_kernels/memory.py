"""Memory as compiled code sees it: addresses as arrays, and the atomic operations that threads agree by."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from treadle_kernels.emit import I64


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Return an int64 address as what `numba.carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(nogil=True)
def floats_at(address, count):
    """Return the float32 at an address as an array `[count]`."""
    return carray(pointer(np.int64(address)), (count,), np.float32)


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Return the int64 at an address; what was written before it was stored is seen from now on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Write an int64; whoever loads it sees what was written before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def replace_if(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write an int64 if the one there is the expected one, in one step; return whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(at, args[1], args[2], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the CPU that this thread waits for another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen
