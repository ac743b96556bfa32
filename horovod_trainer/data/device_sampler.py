"""`sampler` and `exclusion` in torch ops of fixed shapes on one device: the same draws, nodes and local ids, to the bit.

Nothing here waits for the device: every shape follows from what the host knows (batch size, fan-outs), so what varies is
padded, and its size is a tensor. Node N, one past the last, is the padding: it has no neighbours and its inputs are zero.

- A graph is one ascending list of keys row * (N + 1) + column: 8 bytes an entry instead of 4, and whether an entry exists
  is one `searchsorted` instead of a loop of some 25 steps of seven kernels each, most of a step's launches.
- Local ids come from a scatter into a fresh [N + 1] tensor (the least position of every id), not from a sort: a few kernels
  over what was drawn, no state between calls, and order of first sight, which is the CPU's order, comes by itself.
- The time filter compares two nodes' years, never a batch's: later neighbours leave the graph once, when it is loaded.
- Taking every neighbour has no fixed shape and is refused.

It runs in the tests on torch's CPU device and, for shapes and host round trips, on `meta`; it has not run on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_trainer.counters import derive_key
from horovod_trainer.data.device_counters import below64, fold64
from horovod_trainer.data.sampler import Graph

NOTHING = 2**63 - 1  # behind every key
_CHUNK = 1 << 24  # bytes copied to the device at a time


def upload(array: NDArray[Any], device: torch.device, padding: int = 0) -> Tensor:
    """Return a (memory-mapped) array on the device, followed by `padding` zero rows; only a chunk of it is ever copied."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    out = torch.zeros((len(array) + padding, *array.shape[1:]), dtype=kind, device=device)
    step = max(1, _CHUNK // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        chunk = np.array(array[first : first + step])  # a mapping is read-only
        out[first : first + len(chunk)].copy_(torch.from_numpy(chunk))
    return out


@dataclass(frozen=True)
class Rows:
    """A CSR matrix with ascending rows on a device, N = num_nodes; row N is empty.

    indptr: int64 [N+2]; keys: int64 [M+1], row * (N + 1) + column, ascending, closed by (N, N); longest: entries of the
    longest row, at least 1.
    """

    num_nodes: int
    indptr: Tensor
    keys: Tensor
    longest: int

    @classmethod
    def of(
        cls,
        indptr: NDArray[np.int64],
        columns: NDArray[np.int32],
        device: torch.device,
        year: NDArray[np.int32] | None = None,
    ) -> Rows:
        """Return the matrix, with years (int32 [N]) without the entries whose column is later than their row."""
        num_nodes = len(indptr) - 1
        degree = upload(indptr, device).diff()
        row = torch.repeat_interleave(torch.arange(num_nodes, device=device), degree)
        column = upload(columns, device).long()
        if year is not None:
            years = upload(year, device)
            keep = years[column] <= years[row]
            row, column = row[keep], column[keep]
            degree = torch.bincount(row, minlength=num_nodes)
        ends = degree.cumsum(0)
        last = ends.new_full((1,), num_nodes * (num_nodes + 1) + num_nodes)
        return cls(
            num_nodes,
            torch.cat([ends.new_zeros(1), ends, ends[-1:]]),
            torch.cat([row * (num_nodes + 1) + column, last]),
            max(1, int(degree.max())),
        )

    @classmethod
    def of_graph(cls, graph: Graph, device: torch.device) -> Rows:
        """Return the message-passing graph, later neighbours left out when it filters them."""
        return cls.of(graph.indptr, graph.indices, device, graph.year if graph.not_later else None)

    def find(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Return (offset int64 within the row, whether the entry exists bool) of int64 rows and columns, broadcast."""
        key = row * (self.num_nodes + 1) + column
        at = torch.searchsorted(self.keys, key)
        return at - self.indptr[row], self.keys[at] == key

    def columns(self, row: Tensor, offset: Tensor, valid: Tensor) -> Tensor:
        """Return the columns int64 at offsets within rows, N where not valid; broadcast."""
        at = torch.where(valid, self.indptr[row] + offset, len(self.keys) - 1)
        return torch.where(valid, self.keys[at] - row * (self.num_nodes + 1), self.num_nodes)


@dataclass(frozen=True)
class Excluded:
    """The entries a micro-batch may not read, E = 2 P slots ordered by owner, then partner.

    owner: int64 [E], local ids; partner: int64 [E], global ids, N in slots without an entry of the graph; pairs: int64 [],
    unordered pairs {u, v}. keys: int64 [E+1], ascending: owner * width + (row offset - excluded ones before it in the row).
    Position p among what is left lies behind all excluded entries with a key up to owner * width + p.
    """

    owner: Tensor
    partner: Tensor
    pairs: Tensor
    keys: Tensor
    width: int

    @classmethod
    def of_pairs(cls, rows: Rows, nodes: Tensor, source: Tensor, target: Tensor) -> Excluded:
        """Return the exclusion of the pairs (source[i], target[i]), local ids into `nodes` (global ids), both ways."""
        base = rows.num_nodes + 1
        key = (torch.cat([source, target]) * base + nodes[torch.cat([target, source])]).sort().values
        first = torch.ones_like(key, dtype=torch.bool)
        first[1:] = key[1:] != key[:-1]
        owner, partner = key // base, key % base
        loops = (first & (nodes[owner] == partner)).sum()
        offset, found = rows.find(nodes[owner], partner)
        there = first & found
        before = there.cumsum(0) - there.long()
        in_row = before - before[torch.searchsorted(owner, owner)]
        width = rows.longest + 1
        keys = key.new_full((len(key) + 1,), NOTHING)
        keys.scatter_(
            0, torch.where(there, before, len(key)), torch.where(there, owner * width + offset - in_row, NOTHING)
        )
        pairs = (first.sum() - loops) // 2 + loops
        return cls(owner, torch.where(there, partner, rows.num_nodes), pairs, keys, width)

    def starts(self, count: int) -> Tensor:
        """Return int64 [count+1]: how many entries are excluded before each of the first `count` local ids, and in all."""
        return torch.searchsorted(self.keys, torch.arange(count + 1, device=self.keys.device) * self.width)

    def offsets(self, local: Tensor, position: Tensor, starts: Tensor) -> Tensor:
        """Return the row offsets of positions among what is left of the rows of local ids, broadcast."""
        skipped = torch.searchsorted(self.keys, local * self.width + position, right=True)
        return position + skipped - starts[local]


@dataclass(frozen=True)
class PaddedBlock:
    """One hop: destination d receives from neighbours[d, j] where valid[d, j].

    neighbours: int64 [num_dst, fan-out], local ids, 0 where not valid; remaining: int64 [num_dst], what was drawn from.
    Destinations are the first num_dst of num_src rows; rows behind the known nodes are padding that nobody reads.
    """

    num_src: int
    neighbours: Tensor
    valid: Tensor
    remaining: Tensor

    @property
    def num_dst(self) -> int:
        """Rows of the result, padding included."""
        return len(self.neighbours)


def relabel(ids: Tensor, capacity: int, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (local, nodes, count) of global ids int64 [L] numbered in order of first sight; ids of N are padding.

    local: int64 [L], anything for padding; nodes: int64 [capacity], behind the `count` (int64 []) distinct ids all N.
    """
    position = torch.arange(len(ids), device=ids.device)
    first = ids.new_full((num_nodes + 1,), NOTHING).scatter_reduce_(0, ids, position, "amin")[ids]
    new = (first == position) & (ids != num_nodes)
    rank = new.cumsum(0) - 1
    nodes = ids.new_full((capacity + 1,), num_nodes).scatter_(0, torch.where(new, rank, capacity), ids)
    return rank[first], nodes[:capacity], new.sum()


def choose(key: Tensor, left: Tensor, take: int) -> tuple[Tensor, Tensor]:
    """Return (positions int64 [n, take], ascending; valid bool [n, take]): min(take, left) distinct draws on [0, left).

    Floyd's method, as in `sampler`, all rows at once; a row with no more than `take` left takes them all.
    """
    slot = torch.arange(take, device=key.device)
    top = left[:, None] - take + slot
    chosen = below64(key[:, None], slot, top + 1)
    for j in range(1, take):
        taken = (chosen[:, :j] == chosen[:, j : j + 1]).any(1)
        chosen[:, j] = torch.where(taken, top[:, j], chosen[:, j])
    return torch.where(left[:, None] <= take, slot, chosen.sort(dim=1).values), slot < left[:, None]


def draw_neighbours(
    rows: Rows, nodes: Tensor, excluded: Excluded, fanout: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (neighbours int64 [n, fanout], global ids, N where not valid; valid bool; remaining int64 [n]) of nodes [n]."""
    starts = excluded.starts(len(nodes))
    left = rows.indptr[nodes + 1] - rows.indptr[nodes] - starts.diff()
    position, valid = choose(fold64(key, nodes), left, fanout)
    offset = excluded.offsets(torch.arange(len(nodes), device=nodes.device)[:, None], position, starts)
    return rows.columns(nodes[:, None], offset, valid), valid, left


def sample_blocks(
    rows: Rows, seeds: Tensor, count: Tensor, excluded: Excluded, fanouts: tuple[int, ...], key: int
) -> tuple[Tensor, Tensor, list[PaddedBlock]]:
    """Return (nodes, count, blocks): global ids int64 with seeds first and N as padding, how many, one block per fan-out."""
    nodes, blocks = seeds, []
    for hop, fanout in enumerate(fanouts):
        n = len(nodes)
        neighbours, valid, left = draw_neighbours(rows, nodes, excluded, fanout, derive_key(key, hop))
        ids = torch.cat([nodes, neighbours.flatten()])
        local, nodes, count = relabel(ids, min(len(ids), rows.num_nodes), rows.num_nodes)
        block_local = torch.where(valid, local[n:].view(n, fanout), 0)
        blocks.append(PaddedBlock(len(nodes), block_local, valid, left))
    return nodes, count, blocks
