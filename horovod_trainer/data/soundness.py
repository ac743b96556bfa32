"""Whether a graph is safe to walk: compiled kernels check no bounds, so every index is checked once, as a store opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

# name -> types, then dimensions: equal letters are equal lengths, N+1 is one more than N
_LAYOUT: dict[str, tuple[str | int, ...]] = {
    "indptr": ("int64", "N+1"),
    "indices": ("int32", "entries"),
    "train_indptr": ("int64", "N+1"),
    "train_source": ("int32", "E"),
    "train_target": ("int32", "E"),
    "features": ("float32 or float16", "N", "F"),
    "neighbour_sum": ("float32", "N", "F"),
    "neighbour_max": ("float32", "N", "F"),
    "year": ("int32", "N"),
    "valid_edge": ("int32", "valid", 2),
    "valid_negatives": ("int32", "valid", "K"),
    "valid_pool": ("int32", "valid pool", 2),
    "test_edge": ("int32", "test", 2),
    "test_negatives": ("int32", "test", "K of test"),
    "test_pool": ("int32", "test pool", 2),
}
_POINTERS = {"indptr": "indices", "train_indptr": "train_target"}


def flaws(arrays: Arrays) -> list[tuple[str, str]]:
    """Return (name, what is wrong) of every array whose type, shape, row pointers or ids do not fit; [] when sound.

    Reads every index once; features are not read.
    """
    return list(_misfits(arrays)) or [*_gaps(arrays), *_broken_pointers(arrays), *_wild_ids(arrays)]


def _misfits(arrays: Arrays) -> Iterator[tuple[str, str]]:
    nodes = arrays["indptr"].size - 1  # it may have no length
    sizes: dict[str, int] = {"N": nodes, "N+1": nodes + 1}
    for name, (types, *dimensions) in _LAYOUT.items():
        if name not in arrays:
            continue
        array = arrays[name]
        fits = array.dtype.name in str(types).split(" or ") and array.ndim == len(dimensions)
        for dimension, length in zip(dimensions, array.shape, strict=False):
            expected = dimension if isinstance(dimension, int) else sizes.setdefault(dimension, length)
            fits = fits and length == expected
        if not fits:
            wanted = ", ".join(str(sizes.get(str(dimension), dimension)) for dimension in dimensions)
            yield name, f"is {array.dtype} {list(array.shape)}, and beside the others must be {types} [{wanted}]"


def _gaps(arrays: Arrays) -> Iterator[tuple[str, str]]:
    """Yield what leaves nothing to train on or to score."""
    parts = ("negatives", "pool")
    for name in ("train_target", *(f"{split}_{part}" for split in ("valid", "test") for part in ("edge", *parts))):
        if name in arrays and arrays[name].size == 0:
            yield name, "holds nothing"
    for split in ("valid", "test"):
        if sum(f"{split}_{part}" in arrays for part in parts) != 1:
            yield f"{split}_edge", "needs negatives or a shared pool beside it, and one of them alone"


def _broken_pointers(arrays: Arrays) -> Iterator[tuple[str, str]]:
    for name, rows in _POINTERS.items():
        pointers = arrays[name]
        if pointers[0] != 0 or pointers[-1] != len(arrays[rows]) or (pointers[1:] < pointers[:-1]).any():
            yield name, f"does not divide the entries of {rows}"
    source = arrays["train_source"]
    if (source[1:] < source[:-1]).any():
        yield "train_source", "is not in ascending order"


def _wild_ids(arrays: Arrays) -> Iterator[tuple[str, str]]:
    nodes = len(arrays["indptr"]) - 1
    for name, (types, *_) in _LAYOUT.items():
        if types != "int32" or name not in arrays or name == "year" or arrays[name].size == 0:
            continue
        if int(arrays[name].view(np.uint32).max()) >= nodes:  # a negative id reads as a large one: one pass tells
            yield name, f"holds ids outside [0, {nodes})"
