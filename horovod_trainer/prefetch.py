"""The processor's prefetch instruction for kernels: rows that lie anywhere in memory come in while others are worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_READ, _KEEP, _DATA = (ir.Constant(_INT32, value) for value in (0, 3, 1))  # llvm.prefetch's arguments


def _prefetch(typing_context: Any, array: Any, row: Any, byte: Any) -> Any:
    """Ask for the cache line that holds this byte of array[row]; changes nothing but the time a later read takes."""
    signature = types.void(array, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cast(Any, cgutils).unpack_tuple(builder, view.strides)[0]
        start = builder.add(builder.ptrtoint(view.data, _INT64), builder.mul(arguments[1], stride))
        address = builder.inttoptr(builder.add(start, arguments[2]), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
        builder.call(function, [address, _READ, _KEEP, _DATA])
        return context.get_dummy_value()

    return signature, generate


prefetch = cast(Callable[[Any, Any, Any], None], intrinsic(_prefetch))
