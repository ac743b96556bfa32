"""Which node pairs a micro-batch may not pass messages over: its own target pairs, both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.jit import compiled, inlined


@dataclass(frozen=True)
class Exclusion:
    """Excluded partners of the first S nodes of a micro-batch (every endpoint of a target pair is one of them).

    indptr: int64 [S+1]; partners: int32, global ids, ascending within a node; pairs: unordered pairs {u, v} excluded.
    """

    indptr: NDArray[np.int64]
    partners: NDArray[np.int32]
    pairs: int


def no_exclusion() -> Exclusion:
    """Return the exclusion of nothing."""
    return Exclusion(np.zeros(1, np.int64), np.zeros(0, np.int32), 0)


def exclude_pairs(
    nodes: NDArray[np.int32], source: NDArray[np.int64], target: NDArray[np.int64], num_nodes: int
) -> Exclusion:
    """Return the exclusion of the pairs (source[i], target[i]), given as local ids into `nodes` (global ids).

    A pair that occurs twice, or in both directions, is excluded once per direction. num_nodes: nodes in the whole graph.
    """
    if source.size == 0:
        return no_exclusion()
    width = np.int64(num_nodes)
    owner = np.concatenate([source, target])
    partner = nodes[np.concatenate([target, source])].astype(np.int64)
    keys = np.unique(owner * width + partner)
    owners, partners = np.divmod(keys, width)
    indptr = np.zeros(int(owners[-1]) + 2, np.int64)
    np.cumsum(np.bincount(owners), out=indptr[1:])
    loops = int(np.count_nonzero(nodes[owners] == partners))
    return Exclusion(indptr, partners.astype(np.int32), (len(keys) - loops) // 2 + loops)


@inlined
def find(indices: Any, start: Any, stop: Any, value: Any) -> Any:
    """Return the position of `value` in the ascending indices[start:stop], or -1."""
    low, high = start, stop
    while low < high:
        middle = (low + high) >> 1
        if indices[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low if low < stop and indices[low] == value else -1


@compiled
def excluded_positions(
    indices: Any, start: Any, stop: Any, local: Any, ex_indptr: Any, ex_partners: Any, out: Any
) -> Any:
    """Write the offsets within the row of the excluded entries that exist there, ascending; return how many."""
    count = 0
    if local < ex_indptr.shape[0] - 1:
        for i in range(ex_indptr[local], ex_indptr[local + 1]):
            position = find(indices, start, stop, ex_partners[i])
            if position >= 0:
                out[count] = position - start
                count += 1
    return count


@inlined
def offset_left(position: Any, excluded: Any, num_excluded: Any) -> Any:
    """Return the row offset of entry `position` among those not excluded; excluded offsets ascend."""
    for e in range(num_excluded):
        if position < excluded[e]:
            break
        position += 1
    return position


def most_partners(exclusion: Exclusion) -> int:
    """Return the largest number of partners excluded at one node: the scratch size kernels need (at least 1)."""
    return max(1, int(np.diff(exclusion.indptr).max(initial=0)))
