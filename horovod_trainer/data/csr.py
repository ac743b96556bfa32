"""Graphs as rows of ascending neighbours (CSR), built by counting instead of sorting: time and memory linear in edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.exclusion import find
from horovod_trainer.jit import compiled


class Csr(NamedTuple):
    """indptr int64 [N+1], indices int32 [M]: row i holds indices[indptr[i] : indptr[i+1]], ascending."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]

    @property
    def num_nodes(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def rows(self) -> NDArray[np.int32]:
        """Return int32 [M]: the row of every entry, in order."""
        out = np.empty(len(self.indices), np.int32)
        _name_rows(self.indptr, out)
        return out

    def pairs(self) -> NDArray[np.int32]:
        """Return int32 [2, M]: row and entry of every entry, in order."""
        return np.stack([self.rows(), self.indices])

    def positions(self, row: NDArray[Any], entry: NDArray[Any]) -> NDArray[np.int64]:
        """Return int64 [Q]: where each pair (row, entry) stands among the entries, or -1 where it is not one."""
        out = np.empty(len(row), np.int64)
        _find_all(self.indptr, self.indices, row, entry, out)
        return out


def from_pairs(pairs: NDArray[Any], num_nodes: int) -> Csr:
    """Return the rows of pairs [2, E] (row, entry), each ascending, repeats kept; ids must lie in [0, num_nodes).

    Entries are dealt out to one list per entry, then in that order to one list per row, which leaves each row sorted:
    two passes of a counting sort. Pairs that come sorted are taken as they are.
    """
    row, entry = (np.ascontiguousarray(ids, np.int32) for ids in pairs)
    indptr = pointers(row, num_nodes)
    if _ascends(row, entry):
        return Csr(indptr, entry)
    by_entry = np.empty(len(row), np.int32)
    start = pointers(entry, num_nodes)
    _deal(entry, row, start[:-1].copy(), by_entry)
    return Csr(indptr, _turned(start, by_entry, indptr))


def transposed(graph: Csr) -> Csr:
    """Return the graph with every entry (i, j) as (j, i)."""
    indptr = pointers(graph.indices, graph.num_nodes)
    return Csr(indptr, _turned(graph.indptr, graph.indices, indptr))


def distinct(graph: Csr) -> tuple[Csr, int, int]:
    """Return the graph without self-loops and repeats, and how many of each were dropped."""
    indptr = np.empty_like(graph.indptr)
    loops = int(_count_kept(graph.indptr, graph.indices, indptr))
    repeats = len(graph.indices) - loops - int(indptr[-1])
    if loops + repeats == 0:
        return graph, 0, 0
    indices = np.empty(indptr[-1], np.int32)
    _keep(graph.indptr, graph.indices, indptr, indices)
    return Csr(indptr, indices), loops, repeats


def union(a: Csr, b: Csr) -> Csr:
    """Return the graph of all entries of two graphs of as many nodes, once each; their rows are without repeats."""
    indptr = np.empty_like(a.indptr)
    _merge(*a, *b, indptr, np.empty(0, np.int32))
    indices = np.empty(indptr[-1], np.int32)
    _merge(*a, *b, indptr, indices)
    return Csr(indptr, indices)


def symmetric(graph: Csr) -> Csr:
    """Return the graph with every entry in both directions, once each; its rows are without repeats."""
    return union(graph, transposed(graph))


def unordered(graph: Csr) -> Csr:
    """Return every unordered pair once, as the entry (low, high); the graph's rows are without repeats and self-loops."""
    return union(_upper(graph), _upper(transposed(graph)))


def _upper(graph: Csr) -> Csr:
    """Return the entries (i, j) with j > i."""
    row = graph.rows()
    kept = graph.indices > row
    return Csr(pointers(row[kept], graph.num_nodes), graph.indices[kept])


def pointers(ids: NDArray[Any], num_nodes: int) -> NDArray[np.int64]:
    """Return int64 [N+1]: where each id's entries begin when sorted by id; ids that do not occur keep their place."""
    indptr = np.zeros(num_nodes + 1, np.int64)
    _count(ids, indptr[1:])
    return np.cumsum(indptr, out=indptr)


def _turned(indptr: NDArray[np.int64], indices: NDArray[np.int32], out_indptr: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the rows in which each entry occurs, entry by entry, ascending."""
    out = np.empty_like(indices)
    _turn(indptr, indices, out_indptr[:-1].copy(), out)
    return out


@compiled
def _ascends(row: Any, entry: Any) -> Any:
    for e in range(1, row.shape[0]):  # noqa: SIM110 - numba knows no all()
        if row[e] < row[e - 1] or (row[e] == row[e - 1] and entry[e] < entry[e - 1]):
            return False
    return True


@compiled
def _count(ids: Any, counts: Any) -> None:
    for e in range(ids.shape[0]):
        counts[ids[e]] += 1


@compiled
def _deal(key: Any, value: Any, place: Any, out: Any) -> None:
    for e in range(key.shape[0]):
        out[place[key[e]]] = value[e]
        place[key[e]] += 1


@compiled
def _turn(indptr: Any, indices: Any, place: Any, out: Any) -> None:
    for i in range(indptr.shape[0] - 1):
        for e in range(indptr[i], indptr[i + 1]):
            out[place[indices[e]]] = i
            place[indices[e]] += 1


@compiled
def _name_rows(indptr: Any, out: Any) -> None:
    for i in range(indptr.shape[0] - 1):
        out[indptr[i] : indptr[i + 1]] = i


@compiled
def _find_all(indptr: Any, indices: Any, row: Any, entry: Any, out: Any) -> None:
    for i in range(row.shape[0]):
        out[i] = find(indices, indptr[row[i]], indptr[row[i] + 1], entry[i])


@compiled
def _count_kept(indptr: Any, indices: Any, out_indptr: Any) -> Any:
    loops = 0
    out_indptr[0] = 0
    for i in range(indptr.shape[0] - 1):
        kept = 0
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] == i:
                loops += 1
            elif e == indptr[i] or indices[e] != indices[e - 1]:
                kept += 1
        out_indptr[i + 1] = out_indptr[i] + kept
    return loops


@compiled
def _keep(indptr: Any, indices: Any, out_indptr: Any, out: Any) -> None:
    for i in range(indptr.shape[0] - 1):
        place = out_indptr[i]
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] != i and (e == indptr[i] or indices[e] != indices[e - 1]):
                out[place] = indices[e]
                place += 1


@compiled
def _merge(a_indptr: Any, a: Any, b_indptr: Any, b: Any, out_indptr: Any, out: Any) -> None:
    """Fill `out_indptr`, and `out` unless it is empty."""
    count = 0
    for i in range(a_indptr.shape[0] - 1):
        out_indptr[i] = count
        j, k = a_indptr[i], b_indptr[i]
        a_stop, b_stop = a_indptr[i + 1], b_indptr[i + 1]
        while j < a_stop or k < b_stop:
            if k == b_stop or (j < a_stop and a[j] <= b[k]):
                value = a[j]
                if k < b_stop and b[k] == value:
                    k += 1
                j += 1
            else:
                value = b[k]
                k += 1
            if out.shape[0] > 0:
                out[count] = value
            count += 1
    out_indptr[a_indptr.shape[0] - 1] = count
