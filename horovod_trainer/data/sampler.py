"""Layered neighbour sampling: ids in, ids out. Features are never touched here.

A draw depends on the micro-batch's key, the hop and the node's global id only; never on thread, rank or position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.counters import GOLDEN, below64, derive_key, fold64, mix64
from horovod_trainer.data.exclusion import Exclusion, excluded_positions, most_partners, offset_left
from horovod_trainer.jit import compiled, inlined

ALL = -1  # the fan-out that takes every neighbour


@dataclass(frozen=True)
class Graph:
    """The message-passing graph: CSR with ascending rows (indptr int64 [N+1], indices int32 [M]), year int32 [N] or None.

    With `not_later`, a node receives only from neighbours whose year is not later than its own; applied at every hop,
    nothing later than a seed can reach it.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    year: NDArray[np.int32] | None = None
    not_later: bool = False

    def __post_init__(self) -> None:
        if self.not_later and self.year is None:
            raise ValueError("not_later needs the nodes' years")

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, isolated ones included."""
        return len(self.indptr) - 1


@dataclass(frozen=True)
class Block:
    """One hop: destination d receives from local sources cols[indptr[d]:indptr[d+1]].

    Destinations are the first num_dst of the num_src sources. remaining int64 [num_dst]: neighbours left after exclusion
    and time filter, from which indptr[d+1]-indptr[d] were drawn.
    """

    num_dst: int
    num_src: int
    indptr: NDArray[np.int64]
    cols: NDArray[np.int32]
    remaining: NDArray[np.int64]


def sample_blocks(
    graph: Graph, seeds: NDArray[np.int32], exclusion: Exclusion, fanouts: tuple[int, ...], key: int
) -> tuple[NDArray[np.int32], list[Block]]:
    """Return (nodes, blocks): global ids of all nodes, seeds first, and one Block per fan-out, from the seeds outwards.

    seeds: distinct global ids. Draws are without replacement: min(fan-out, degree - excluded) of what remains.
    """
    table = NodeTable(seeds)
    blocks = []
    for hop, fanout in enumerate(fanouts):
        num_dst = table.count
        indptr, neighbours, remaining = draw_neighbours(graph, table.nodes(), exclusion, fanout, derive_key(key, hop))
        cols = table.add(neighbours)
        blocks.append(Block(num_dst, table.count, indptr, cols, remaining))
    return table.nodes().copy(), blocks


def draw_neighbours(
    graph: Graph, nodes: NDArray[np.int32], exclusion: Exclusion, fanout: int, key: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return (indptr int64 [n+1], global neighbour ids int32, remaining int64 [n]) for local nodes 0..n-1."""
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes] if len(nodes) else np.zeros(0, np.int64)
    most = int(degree.max(initial=0))
    capacity = int(degree.sum()) if fanout == ALL else int(np.minimum(degree, fanout).sum())
    year = graph.year if graph.year is not None and graph.not_later else np.zeros(0, np.int32)
    indptr = np.zeros(len(nodes) + 1, np.int64)
    out = np.empty(capacity, np.int32)
    remaining = np.empty(len(nodes), np.int64)
    scratch = np.empty((2, max(1, most)), np.int64)
    filled = _draw(
        graph.indptr, graph.indices, year, nodes, exclusion.indptr, exclusion.partners,
        most if fanout == ALL else fanout, np.uint64(key), indptr, out, remaining,
        np.empty(most_partners(exclusion), np.int64), scratch,
    )  # fmt: skip
    return indptr, out[:filled], remaining


@compiled
def _draw(
    row_indptr: Any, row_indices: Any, year: Any, nodes: Any, ex_indptr: Any, ex_partners: Any,
    fanout: Any, key: Any, out_indptr: Any, out: Any, remaining: Any, excluded: Any, scratch: Any,
) -> Any:  # fmt: skip
    filled = 0
    eligible, chosen = scratch[0], scratch[1]
    for i in range(nodes.shape[0]):
        node = nodes[i]
        start, stop = row_indptr[node], row_indptr[node + 1]
        num_excluded = excluded_positions(row_indices, start, stop, i, ex_indptr, ex_partners, excluded)
        filtered = year.shape[0] > 0
        if filtered:  # list what is left; without a time filter the list stays implicit and a hub costs nothing
            count, skip = 0, 0
            for offset in range(stop - start):
                if skip < num_excluded and excluded[skip] == offset:
                    skip += 1
                elif year[row_indices[start + offset]] <= year[node]:
                    eligible[count] = offset
                    count += 1
        else:
            count = (stop - start) - num_excluded
        take = min(fanout, count)
        if take == count:
            for j in range(count):
                chosen[j] = j
        else:
            _choose(fold64(key, node), count, take, chosen)
        for j in range(take):
            offset = eligible[chosen[j]] if filtered else offset_left(chosen[j], excluded, num_excluded)
            out[filled + j] = row_indices[start + offset]
        filled += take
        remaining[i] = count
        out_indptr[i + 1] = filled
    return filled


@inlined
def _choose(key: Any, n: Any, k: Any, out: Any) -> Any:
    """Write k distinct draws from [0, n), ascending: Floyd's method (Bentley, Floyd 1987, "A sample of brilliance")."""
    for i in range(k):
        top = n - k + i
        draw = below64(key, i, top + 1)
        at = 0
        while at < i and out[at] < draw:
            at += 1
        if at < i and out[at] == draw:  # already chosen: take `top`, larger than everything chosen so far
            out[i] = top
        else:
            for j in range(i, at, -1):
                out[j] = out[j - 1]
            out[at] = draw


class NodeTable:
    """Global id -> local id, in order of first sight: an open-addressing hash that grows (no sorting, no [N] array)."""

    def __init__(self, seeds: NDArray[np.int32]) -> None:
        self.count = 0
        self._nodes = np.empty(max(16, 2 * len(seeds)), np.int32)
        self._keys = np.full(64, -1, np.int32)
        self._locals = np.empty(64, np.int32)
        self.add(seeds)

    def nodes(self) -> NDArray[np.int32]:
        """Return the global ids seen so far: a view, int32 [count]."""
        return self._nodes[: self.count]

    def add(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the local ids of `ids`, giving new nodes the next ones: int32 [len(ids)]."""
        need = self.count + len(ids)
        if need > len(self._nodes):
            self._nodes = np.concatenate([self.nodes(), np.empty(2 * need - self.count, np.int32)])
        if 2 * need > len(self._keys):
            size = 1 << int(2 * need).bit_length()
            self._keys = np.full(size, -1, np.int32)
            self._locals = np.empty(size, np.int32)
            _insert(self.nodes().copy(), self._keys, self._locals, self._nodes, 0, np.empty(self.count, np.int32))
        out = np.empty(len(ids), np.int32)
        self.count = int(_insert(ids, self._keys, self._locals, self._nodes, self.count, out))
        return out


@compiled
def _insert(ids: Any, keys: Any, locals_: Any, nodes: Any, count: Any, out: Any) -> Any:
    mask = np.uint64(keys.shape[0] - 1)
    for i in range(ids.shape[0]):
        node = ids[i]
        slot = mix64(np.uint64(node) * GOLDEN) & mask
        while keys[slot] != node and keys[slot] != -1:
            slot = (slot + np.uint64(1)) & mask
        if keys[slot] == -1:
            keys[slot] = node
            locals_[slot] = count
            nodes[count] = node
            count += 1
        out[i] = locals_[slot]
    return count
