"""Reading other people's pickles without running them: an unpickler that knows a few names, most of them stand-ins."""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable
from typing import IO, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.jit import compiled

_LONG = 1 << 20  # characters of a text that is decoded piece by piece
_wide, _place = (cast(Any, kind) for kind in (np.int64, np.uint64))  # unsigned places need no test for negative ones


class SparseRows:
    """What a pickled scipy.sparse.csr_matrix holds, without its code: the state is kept, nothing is computed."""

    state: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def dense(self, name: str) -> NDArray[np.float32]:
        """Return the matrix as float32 [rows, columns]; raises InvalidInput when its parts do not fit together."""
        try:
            data, columns, indptr = (np.asarray(self.state[key]) for key in ("data", "indices", "indptr"))
            n, width = (int(size) for size in self.state["_shape"])
            out = np.zeros((n, width), np.float32)
            if columns.min(initial=0) < 0:
                raise ValueError("negative column")
            out[np.repeat(np.arange(n), np.diff(indptr)), columns] = data
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as failure:
            raise InvalidInput(Problem(name, f"not a sparse matrix: {failure}")) from None
        return out


class _Numbers(np.ndarray[Any, Any]):
    """An array whose pickled state may hold plain numbers only; object arrays would carry arbitrary things."""

    def __setstate__(self, state: Any) -> None:
        dtype = state[2]
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"an array of {dtype}, not of numbers")
        super().__setstate__(state)


class _Array:
    """Stands for numpy.ndarray, which pickles only name and never call."""

    def __init__(self) -> None:
        raise pickle.UnpicklingError("an array that is called, not reconstructed")


def _reconstruct(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    """Do numpy's array reconstruction: an empty array, which its state then fills."""
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of another class")
    return np.ndarray.__new__(_Numbers, (0,), "b")


def _scalar(dtype: Any, content: Any) -> Any:
    """Do numpy's scalar reconstruction, for plain numbers."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
        raise pickle.UnpicklingError(f"a scalar of {dtype}, not a number")
    return np.frombuffer(content.encode("latin1") if isinstance(content, str) else content, dtype, 1)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    """Do what Python 3 asks for where protocol 2 has no bytes; no other codec is looked up."""
    if isinstance(text, bytes):  # `_Streaming` was here
        return text
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): collections.defaultdict,
    ("__builtin__", "list"): list,  # Python 2's name of builtins
    ("builtins", "list"): list,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encode,
    ("scipy.sparse.csr", "csr_matrix"): SparseRows,
    ("scipy.sparse._csr", "csr_matrix"): SparseRows,
}


# all that the unpickler raises on bytes that are no pickle, or not one of ours
FOREIGN = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError,
    OverflowError, MemoryError, struct.error, AssertionError,
)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


class _Streaming(pickle._Unpickler):
    """Takes long texts, which are arrays' bytes in protocol 2, for latin-1 and never holds them as text.

    Python's own unpickler in C needs three times an array's memory for it.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    find_class = _Unpickler.find_class

    def load_binunicode(self) -> None:
        """Read a text of a stated number of bytes."""
        reader: Any = self  # its methods come into being in load()
        (length,) = struct.unpack("<I", reader.read(4))
        short = length < _LONG
        reader.append(str(reader.read(length), "utf-8", "surrogatepass") if short else _latin1(reader.read, length))

    dispatch[pickle.BINUNICODE[0]] = load_binunicode


def _latin1(read: Callable[[int], bytes], length: int) -> bytes:
    """Return the latin-1 bytes of a UTF-8 text of `length` bytes; raises UnpicklingError for any other text."""
    out, piece, rest = io.BytesIO(), np.empty(_LONG + 1, np.uint8), b""
    while length > 0:
        coded = read(min(_LONG, length))
        if not coded:
            raise EOFError("it ends within a text")
        length -= len(coded)
        text = rest + coded
        made, used = _decode(np.frombuffer(text, np.uint8), piece)
        rest = text[used:]
        if made < 0 or len(rest) > 1:
            raise pickle.UnpicklingError("a text that is not latin-1")
        out.write(piece[:made].data)
    if rest:
        raise pickle.UnpicklingError("a text that is not latin-1")
    return out.getvalue()  # without a copy


@compiled
def _decode(text: Any, out: Any) -> Any:
    """Return the bytes written and read, all but a last half character; (-1, 0) where one is beyond 255 or no UTF-8.

    Zeros, most bytes of an array of ids, come in runs; which of the others need two bytes is anybody's guess, so there
    are no branches for it.
    """
    at, made, one, last, bad = _place(0), _place(0), _place(1), _place(text.shape[0] - 1), 0
    while at < last:
        if text[at] == 0:
            out[made] = 0
            at += one
            made += one
            continue
        first, second = _wide(text[at]), _wide(text[at + one])
        two = first >> 7
        bad |= two * ((first & 0xFE ^ 0xC2) | (second & 0xC0 ^ 0x80))
        out[made] = first + two * (((first & 3) << 6 | second & 0x3F) - first)
        at += one + _place(two)
        made += one
    if at == last and text[at] < 0x80:
        out[made] = text[at]
        at += one
        made += one
    return (-1, 0) if bad else (_wide(made), _wide(at))


def load_pickle(name: str, stream: IO[bytes], *, large: bool = False) -> Any:
    """Return the next object in a stream of pickles of lists, dictionaries, numpy arrays and csr matrices (SparseRows).

    `name` is for the message. large: spare memory, not the time of many small objects. Raises InvalidInput for anything
    else, before it is called.
    """
    try:
        return (_Streaming if large else _Unpickler)(stream, encoding="latin1").load()
    except FOREIGN as failure:
        raise InvalidInput(Problem(name, f"refused: {failure}")) from None
