"""Full-graph embeddings, layer by layer, in node blocks of a fixed grid over global ids, split over ranks.

A block's result depends on the grid alone: every block is computed by one thread, so scores are bit-equal for any number
of ranks and threads. A layer is read through a mapping that the ranks of a host share; the layer being computed goes
straight to disk and is mapped when it is whole and the layer before it is gone: one layer's output is in memory. The
files have no name any more once all have opened them.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from horovod_trainer.comm.base import Communicator, gather_text
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Aggregator, Features, aggregate_range
from horovod_trainer.data.sampler import Graph
from horovod_trainer.errors import naming
from horovod_trainer.jit import compiled
from horovod_trainer.model import Encoder, SageLayer

Matrix = NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # stage, done, total


def quiet(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def nothing() -> None:
    """Do nothing."""


class LayerFile:
    """float32 [N, D] rows in one unlinked file that all ranks of a host share; rank r of R fills blocks r, r+R, ..."""

    def __init__(self, comm: Communicator, shape: tuple[int, int], block: int, scratch: Path) -> None:
        self.comm, self.shape, self.block = comm, shape, block
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
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  # closed by `whole`, or with the object
            comm.barrier()
        finally:
            if self._leader:  # from here on the file lives as long as it is open or mapped
                path.unlink(missing_ok=True)

    def blocks(self) -> list[tuple[int, int]]:
        """Return the whole grid as [first, last) node ranges."""
        nodes = self.shape[0]
        return [(first, min(first + self.block, nodes)) for first in range(0, nodes, self.block)]

    def mine(self) -> list[tuple[int, int]]:
        """Return this rank's blocks."""
        return self.blocks()[self.comm.rank :: self.comm.size]

    def write(self, first: int, rows: Matrix) -> None:
        """Put rows first, first + 1, ... where they belong; safe in several threads."""
        start, length = first * self.shape[1] * 4, rows.nbytes
        left = rows.data.cast("B")
        while left:
            left = left[os.pwrite(self._file.fileno(), left, start + length - len(left)) :]
        # starts the way to disk and does not wait: pages that are there, and that nobody maps, go first when memory is short
        os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_DONTNEED)

    def whole(self) -> Matrix:
        """Return all rows, mapped, once every rank has written its blocks; brings those of other hosts here."""
        rows: Matrix = np.memmap(self._file, np.float32, "r+", shape=self.shape)
        self._file.close()
        if len(set(self._hosts)) > 1:
            grid, size = self.blocks(), self.comm.size
            for start in range(0, len(grid), size):
                turn = grid[start : start + size]
                first, last = turn[self.comm.rank] if self.comm.rank < len(turn) else (0, 0)
                parts = self.comm.allgather(torch.from_numpy(np.array(rows[first:last])))
                for rank, (first, last) in enumerate(turn):
                    if self._leader and self._hosts[rank] != self._hosts[self.comm.rank]:
                        rows[first:last] = parts[rank].numpy()
        self.comm.barrier()
        return rows


class Buffers(threading.local):
    """float32 tensors that a thread uses again and again, by name: fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def get(self, name: str, rows: int, width: int, device: torch.device | None = None) -> torch.Tensor:
        """Return this thread's tensor [rows, width] of that name, holding whatever was left in it."""
        held = self._held.get(name)
        if held is None or held.numel() < rows * width:
            held = self._held[name] = torch.empty(rows * width, device=device)
        return held[: rows * width].view(rows, width)


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
    between: Callable[[], None] = nothing,
) -> Matrix:
    """Return the embeddings of all nodes, float32 [N, out], the same bits on every rank.

    between: called by every rank before each layer; what it raises ends the work.

    Uses the encoder's own device for the layers. stored_first_hop: read layer 1's neighbourhoods from the store.
    """
    scratch = scratch or Path(tempfile.gettempdir())
    previous: Matrix | None = None
    total = len(encoder.layers) * -(-graph.num_nodes // node_block)
    done = 0
    buffers = Buffers()
    with one_thread_per_block(threads) as pool:
        for number, width in enumerate(encoder.widths):
            between()
            file = LayerFile(comm, (graph.num_nodes, width), node_block, scratch)

            def compute(block: tuple[int, int], number: int = number, file: LayerFile = file,
                        h: Matrix | None = previous) -> None:  # fmt: skip
                own, aggregated = _layer_input(graph, features, h, block, encoder.aggregator, stored_first_hop, buffers)
                file.write(block[0], _layer(encoder, number, own, aggregated, buffers))

            for _ in pool.map(compute, file.mine()):
                done += comm.size
                progress("embeddings", min(done, total), total)
            del compute  # its default would keep the layer before alive
            previous = None
            previous = file.whole()
    if previous is None:
        raise ValueError("an encoder has at least one layer")
    return previous


def _layer(encoder: Encoder, number: int, own: Matrix, aggregated: Matrix, buffers: Buffers) -> Matrix:
    """Return layer `number`'s rows as the next layer reads them: what its forward does, in place."""
    layer = cast(SageLayer, encoder.layers[number])
    device = layer.own.weight.device
    with torch.inference_mode():
        out = buffers.get("out", len(own), encoder.widths[number], device)
        torch.addmm(layer.neighbour.bias, torch.from_numpy(aggregated).to(device), layer.neighbour.weight.t(), out=out)
        out.addmm_(torch.from_numpy(own).to(device), layer.own.weight.t())
        if layer.normalise:
            functional.normalize(out, dim=-1, out=out)
        if number < len(encoder.layers) - 1:
            out.relu_()
        rows: Matrix = out.cpu().numpy()
        return rows


def _layer_input(
    graph: Graph,
    features: Features,
    previous: Matrix | None,
    block: tuple[int, int],
    aggregator: Aggregator,
    stored_first_hop: bool,
    buffers: Buffers,
) -> tuple[Matrix, Matrix]:
    """Return (own rows, aggregated neighbourhoods) of one block, both float32 [last - first, width]."""
    first, last = block
    values = features.values if previous is None else previous
    own = buffers.get("own", last - first, values.shape[1]).numpy()
    own[:] = values[first:last]
    if previous is None and stored_first_hop:
        nodes = np.arange(first, last, dtype=np.int32)
        return own, features.neighbourhood(graph, nodes, no_exclusion(), aggregator)
    if previous is None or aggregator == "max":
        return own, aggregate_range(graph, values, first, last, aggregator)
    aggregated = buffers.get("aggregated", last - first, values.shape[1]).numpy()
    year = graph.year if graph.not_later and graph.year is not None else np.zeros(0, np.int32)
    _add_up(graph.indptr, graph.indices, year, previous, first, aggregator == "mean", aggregated)
    return own, aggregated


@compiled
def _add_up(indptr: Any, indices: Any, year: Any, h: Any, first: Any, mean: Any, out: Any) -> None:
    """Add runs of 64 rows in float32, twice as fast as float64, and the runs in float64: hubs have many terms."""
    width = out.shape[1]
    total, run = np.empty(width, np.float64), np.empty(width, np.float32)
    for i in range(out.shape[0]):
        node = first + i
        used = 0
        total[:] = 0.0
        run[:] = np.float32(0)
        for e in range(indptr[node], indptr[node + 1]):
            neighbour = indices[e]
            if year.shape[0] > 0 and year[neighbour] > year[node]:
                continue
            for f in range(width):
                run[f] += h[neighbour, f]
            used += 1
            if used % 64 == 0:
                for f in range(width):
                    total[f] += run[f]
                    run[f] = np.float32(0)
        scale = 1.0 / used if mean and used > 0 else 1.0
        for f in range(width):
            out[i, f] = (total[f] + run[f]) * scale
