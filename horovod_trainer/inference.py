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

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_trainer.comm.base import Communicator, gather_text
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Aggregator, Features, aggregate_range
from horovod_trainer.data.sampler import Graph
from horovod_trainer.errors import naming
from horovod_trainer.model import Encoder

Matrix = NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # stage, done, total


def quiet(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class HostMatrix:
    """float32 [N, D] rows that all ranks of a host share through one unlinked file; rank r of R fills blocks r, r+R, ..."""

    def __init__(self, comm: Communicator, shape: tuple[int, int], block: int, scratch: Path) -> None:
        self.comm, self.block = comm, block
        folder = scratch.stat()  # pods of one node may share its host name, not its files
        hosts = gather_text(comm, f"{comm.host} {folder.st_dev} {folder.st_ino}")
        here = hosts[comm.rank]
        self._hosts = hosts
        self._leader = hosts.index(here) == comm.rank
        token = int.from_bytes(os.urandom(7), "big")
        shared = torch.tensor([token])
        comm.broadcast_([shared])
        path = scratch / f"horovod-trainer-{int(shared[0]):x}-{hosts.index(here)}"
        try:
            if self._leader:
                with naming(path), open(path, "wb") as file:  # reserved now: later a full disk would be a bus error
                    os.posix_fallocate(file.fileno(), 0, max(1, shape[0] * shape[1] * 4))
            comm.barrier()
            self.rows: Matrix = np.memmap(path, np.float32, "r+", shape=shape)
            comm.barrier()
        finally:
            if self._leader:  # from here on the file lives as long as it is mapped
                path.unlink(missing_ok=True)

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
                    if self._leader and self._hosts[rank] != self._hosts[self.comm.rank]:
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
    progress: Progress = quiet,
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
                progress("embeddings", min(done, total), total)
            del compute  # its default would keep the layer before alive
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
