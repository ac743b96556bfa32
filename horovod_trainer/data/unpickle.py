"""Reading other people's pickles without running them: an unpickler that knows a few names, most of them stand-ins."""

from __future__ import annotations

import collections
import pickle
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.errors import InvalidInput, Problem


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
    OverflowError, MemoryError,
)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def load_pickle(name: str, stream: IO[bytes]) -> Any:
    """Return the next object in a stream of pickles of lists, dictionaries, numpy arrays and csr matrices (SparseRows).

    `name` is for the message. Raises InvalidInput for anything else, before it is called.
    """
    try:
        return _Unpickler(stream, encoding="latin1").load()
    except FOREIGN as failure:
        raise InvalidInput(Problem(name, f"refused: {failure}")) from None
