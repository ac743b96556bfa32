"""Full-graph embeddings, layer by layer, in node blocks of a fixed grid over global ids, split over ranks.

A block's result depends on the grid alone: every block is computed by one thread, so scores are bit-equal for any number
of ranks and threads. One layer's input and output exist at a time, in files the ranks of a host share and that have no
name any more once all have opened them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_trainer.comm.base import Communicator, gather_text
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Aggregator, Features, readable, value_at
from horovod_trainer.data.sampler import Graph
from horovod_trainer.errors import naming
from horovod_trainer.jit import compiled
from horovod_trainer.model import Encoder

Matrix = NDArray[np.float32]


class HostMatrix:
    """float32 [N, D] rows that all ranks of a host share through one unlinked file; rank r of R fills blocks r, r+R, ..."""

    def __init__(self, comm: Communicator, shape: tuple[int, int], block: int, scratch: Path) -> None:
        self.comm, self.block = comm, block
        hosts = gather_text(comm, comm.host)
        self._hosts = hosts
        self._leader = hosts.index(comm.host) == comm.rank
        token = int.from_bytes(os.urandom(7), "big")
        shared = torch.tensor([token])
        comm.broadcast_([shared])
        path = scratch / f"horovod-trainer-{int(shared[0]):x}-{hosts.index(comm.host)}"
        if self._leader:
            with naming(path), open(path, "wb") as file:  # reserved now: a full disk is an error here, a bus error in a mapped page
                os.posix_fallocate(file.fileno(), 0, max(1, shape[0] * shape[1] * 4))
        comm.barrier()
        self.rows: Matrix = np.memmap(path, np.float32, "r+", shape=shape)
        comm.barrier()
        if self._leader:
            path.unlink()

    def blocks(self) -> list[tuple[int, int]]:
        """Return the whole grid as [first, last) node ranges."""
        nodes = self.rows.shape[0]
        return [(first, min(first + self.block, nodes)) for first in range(0, nodes, self.block)]

    def mine(self) -> list[tuple[int, int]]:
        """Return this rank's blocks."""
        return self.blocks()[self.comm.rank :: self.comm.size]

    def exchange(self) -> None:
        """Bring the rows that other hosts computed here; afterwards every rank reads every row."""
        if len(set(self._hosts)) > 1:
            grid, size = self.blocks(), self.comm.size
            for start in range(0, len(grid), size):
                turn = grid[start : start + size]
                first, last = turn[self.comm.rank] if self.comm.rank < len(turn) else (0, 0)
                parts = self.comm.allgather(torch.from_numpy(np.array(self.rows[first:last])))
                for rank, (first, last) in enumerate(turn):
                    if self._leader and self._hosts[rank] != self.comm.host:
                        self.rows[first:last] = parts[rank].numpy()
        self.comm.barrier()


@contextmanager
def one_thread_per_block(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `threads` workers in which torch computes with one thread each; restores torch's threads after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, "block", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def embed(
    encoder: Encoder,
    graph: Graph,
    features: Features,
    comm: Communicator,
    *,
    stored_first_hop: bool,
    node_block: int,
    threads: int,
    scratch: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Matrix:
    """Return the embeddings of all nodes, float32 [N, out], the same bits on every rank.

    Uses the encoder's own device for the layers. stored_first_hop: read layer 1's neighbourhoods from the store.
    """
    scratch = scratch or Path(tempfile.gettempdir())
    previous: Matrix | None = None
    device = next(encoder.parameters()).device
    total = len(encoder.layers) * -(-graph.num_nodes // node_block)
    done = 0
    with one_thread_per_block(threads) as pool:
        for number in range(len(encoder.layers)):
            matrix = HostMatrix(comm, (graph.num_nodes, encoder.widths[number]), node_block, scratch)

            def compute(block: tuple[int, int], number: int = number, out: HostMatrix = matrix,
                        h: Matrix | None = previous) -> None:  # fmt: skip
                own, aggregated = _layer_input(graph, features, h, block, encoder.aggregator, stored_first_hop)
                with torch.inference_mode():
                    rows = encoder.layers[number](
                        torch.from_numpy(own).to(device), torch.from_numpy(aggregated).to(device)
                    )
                    out.rows[block[0] : block[1]] = encoder.activate(number, rows).cpu().numpy()

            for _ in pool.map(compute, matrix.mine()):
                done += comm.size
                progress(min(done, total), total)
            matrix.exchange()
            previous = matrix.rows
    if previous is None:
        raise ValueError("an encoder has at least one layer")
    return previous


def _layer_input(
    graph: Graph,
    features: Features,
    previous: Matrix | None,
    block: tuple[int, int],
    aggregator: Aggregator,
    stored_first_hop: bool,
) -> tuple[Matrix, Matrix]:
    """Return (own rows, aggregated neighbourhoods) of one block, both float32 [last - first, width]."""
    first, last = block
    nodes = np.arange(first, last, dtype=np.int32)
    if previous is None and stored_first_hop:
        return features.rows(nodes), features.neighbourhood(graph, nodes, no_exclusion(), aggregator)
    h = features.values if previous is None else previous
    own = features.rows(nodes) if previous is None else np.array(previous[first:last])
    return own, aggregate_range(graph, h, first, last, aggregator)


def aggregate_range(graph: Graph, h: NDArray[Any], first: int, last: int, aggregator: Aggregator) -> Matrix:
    """Return the aggregated neighbourhoods of nodes first .. last-1 from all rows h [N, D]: float32 [last - first, D]."""
    year = graph.year if graph.not_later and graph.year is not None else np.zeros(0, np.int32)
    out = np.empty((last - first, h.shape[1]), np.float32)
    kind = {"sum": 0, "mean": 1, "max": 2}[aggregator]
    _aggregate_range(graph.indptr, graph.indices, year, *readable(h), first, kind, out)
    return out


@compiled
def _aggregate_range(indptr: Any, indices: Any, year: Any, h: Any, half: Any, first: Any, kind: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        node = first + i
        used = 0
        out[i, :] = np.float32(0)
        for e in range(indptr[node], indptr[node + 1]):
            neighbour = indices[e]
            if year.shape[0] > 0 and year[neighbour] > year[node]:
                continue
            used += 1
            for f in range(out.shape[1]):
                value = value_at(h, half, neighbour, f)
                if kind == 2:
                    out[i, f] = value if used == 1 else max(out[i, f], value)
                else:
                    out[i, f] += value
        if kind == 1 and used > 0:
            scale = np.float32(1.0) / np.float32(used)
            for f in range(out.shape[1]):
                out[i, f] *= scale
