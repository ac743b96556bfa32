"""The unit of training: a micro-batch, a pure function of (seed, epoch, step, micro-batch number)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.counters import Stream, derive_key, permutation
from horovod_trainer.data.exclusion import Exclusion, exclude_pairs, no_exclusion
from horovod_trainer.data.gather import Aggregator, Features, Inputs
from horovod_trainer.data.negatives import Candidates, Negatives, draw_shared, draw_uniform
from horovod_trainer.data.sampler import Block, Graph, NodeTable, sample_blocks

LARGE = 2**23  # of n * F: beyond 64 MiB inputs are gathered by the layer that reads them, and again in its backward


@dataclass(frozen=True)
class Schedule:
    """Who trains on what: E seed edges in micro-batches of B, G micro-batches a step, shared out over R ranks.

    Position p of the epoch's order belongs to micro-batch (p // B) % G of step p // (B * G), whatever R is; rank r runs
    micro-batches r, r + R, ... of every step, so all ranks take the same number of steps.
    """

    seed: int
    num_edges: int
    batch_size: int
    micro_batches: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the seed edges, the last of which may be short."""
        return -(-self.num_edges // (self.batch_size * self.micro_batches))

    def positions(self, step: int, micro: int) -> tuple[int, int]:
        """Return [first, last) positions in the epoch's order of one micro-batch of the epoch's step `step`.

        A number of G or more is nobody's: the empty micro-batch of a rank that has no other.
        """
        if micro >= self.micro_batches:
            return self.num_edges, self.num_edges
        first = (step * self.micro_batches + micro) * self.batch_size
        return min(first, self.num_edges), min(first + self.batch_size, self.num_edges)

    def positives(self, step: int) -> int:
        """Return the number of seed edges in a step, over all ranks."""
        first = step * self.micro_batches * self.batch_size
        return min(first + self.micro_batches * self.batch_size, self.num_edges) - first

    def share(self, rank: int, size: int) -> range:
        """Return the micro-batch numbers that a rank runs in every step: at least one, be it an empty one."""
        return range(rank, max(self.micro_batches, size), size)

    def edges(self, epoch: int, step: int, micro: int) -> NDArray[np.int64]:
        """Return the seed-edge numbers of one micro-batch: int64 [<= B], each edge once per epoch."""
        first, last = self.positions(step, micro)
        return permutation(derive_key(self.seed, Stream.ORDER, epoch), self.num_edges, first, last - first)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward needs, in local ids of `nodes`; arrays as named in their modules.

    inputs: float32 [n, F], or [n, 2F] with every node's exact first-hop neighbourhood beside its own row, in the buffer
    that `build` was given; a large [n, 2F] comes as `Inputs`, to be gathered in parts.
    """

    micro: int
    nodes: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    tails: NDArray[np.int32]
    negatives: Negatives
    blocks: list[Block]
    inputs: NDArray[np.float32] | Inputs
    stored_first_hop: bool
    excluded_pairs: int
    dropout_key: int

    def sums(self) -> list[float]:
        """Return what is counted of it: pairs excluded, negatives drawn, masked, and citing; in the order of the log."""
        negatives = self.negatives
        masked = negatives.drawn - int(negatives.valid.sum())
        return [float(self.excluded_pairs), float(negatives.drawn), float(masked), float(negatives.citing)]

    def dense(self) -> NDArray[np.float32]:
        """Return the inputs as one array, gathered now where they are not."""
        return self.inputs.part(0, len(self.nodes)) if isinstance(self.inputs, Inputs) else self.inputs


class Buffer:
    """Memory for one micro-batch's inputs, used again for the next: fresh pages cost more than what is gathered."""

    def __init__(self) -> None:
        self._flat = np.empty(0, np.float32)

    def take(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Return float32 [rows, columns] with any content; what was taken before is overwritten."""
        need = rows * columns
        if need > len(self._flat):
            self._flat = np.empty(0, np.float32)  # given back first: never two at a time
            self._flat = np.empty(need + need // 8, np.float32)
        return self._flat[:need].reshape(rows, columns)


@dataclass(frozen=True)
class Recipe:
    """Everything a micro-batch is made from besides its number."""

    schedule: Schedule
    graph: Graph
    edge_source: NDArray[np.int32]
    edge_target: NDArray[np.int32]
    candidates: Candidates
    features: Features
    fanouts: tuple[int, ...]
    negative_count: int
    shared_negatives: bool
    exclude_targets: bool
    stored_first_hop: Aggregator | None

    @property
    def hops(self) -> tuple[int, ...]:
        """Fan-outs of the hops that are sampled: with the stored first-hop term, all but the deepest."""
        return self.fanouts[:-1] if self.stored_first_hop else self.fanouts

    def build(self, epoch: int, step: int, micro: int, buffer: Buffer | None = None) -> MicroBatch:
        """Return micro-batch `micro` of the epoch's step `step`; the same for every rank, thread and time of asking.

        With a buffer it lasts until the next one is built there.
        """
        key = (self.schedule.seed, epoch, step, micro)
        edges = self.schedule.edges(epoch, step, micro)
        source, target = self.edge_source[edges], self.edge_target[edges]
        draw = draw_shared if self.shared_negatives else draw_uniform
        negatives = draw(self.candidates, source, target, self.negative_count, derive_key(*key, Stream.NEGATIVES))
        table = NodeTable(np.zeros(0, np.int32))
        local_source, local_target = table.add(source), table.add(target)
        endpoints = table.nodes().copy()
        tails = table.add(negatives.tails.ravel()) if len(edges) else np.zeros(0, np.int32)
        exclusion = self._exclusion(endpoints, local_source, local_target)
        nodes, blocks = sample_blocks(
            self.graph, table.nodes().copy(), exclusion, self.hops, derive_key(*key, Stream.SAMPLING)
        )
        return MicroBatch(
            micro, nodes, local_source, local_target, tails.reshape(negatives.tails.shape if len(edges) else (0,)),
            negatives, blocks, self._inputs(nodes, exclusion, buffer or Buffer()), self.stored_first_hop is not None,
            exclusion.pairs, derive_key(*key, Stream.DROPOUT),
        )  # fmt: skip

    def _exclusion(
        self, endpoints: NDArray[np.int32], source: NDArray[np.int32], target: NDArray[np.int32]
    ) -> Exclusion:
        if not self.exclude_targets:
            return no_exclusion()
        return exclude_pairs(endpoints, source.astype(np.int64), target.astype(np.int64), self.graph.num_nodes)

    def _inputs(
        self, nodes: NDArray[np.int32], exclusion: Exclusion, buffer: Buffer
    ) -> NDArray[np.float32] | Inputs:  # fmt: skip
        width = self.features.width
        if self.stored_first_hop is None:
            return self.features.rows(nodes, buffer.take(len(nodes), width))
        later = Inputs(self.features, self.graph, nodes, exclusion, self.stored_first_hop)
        return later if len(nodes) * width > LARGE else later.part(0, len(nodes), buffer.take(len(nodes), 2 * width))


def prefetch(recipe: Recipe, work: Sequence[tuple[int, int, int]], ahead: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `work` (epoch, step, micro) in order, built up to `ahead` in advance by one thread.

    A micro-batch lasts until the next is asked for: ahead + 1 buffers go round. An error while building is raised where
    the micro-batch would have come. ahead = 0 builds in the caller's thread.
    """
    if ahead == 0:
        buffer = Buffer()
        yield from (recipe.build(*item, buffer) for item in work)
        return
    ready: queue.SimpleQueue[MicroBatch | BaseException] = queue.SimpleQueue()
    free = threading.Semaphore(ahead)  # the buffers that nobody reads
    stop = threading.Event()

    def run() -> None:
        buffers = [Buffer() for _ in range(ahead + 1)]
        try:
            for number, item in enumerate(work):
                free.acquire()
                if stop.is_set():
                    return
                ready.put(recipe.build(*item, buffers[number % len(buffers)]))
        except BaseException as failure:  # handed to the consumer, which raises it
            ready.put(failure)

    thread = threading.Thread(target=run, name="sampler", daemon=True)
    thread.start()
    try:
        for _ in work:
            item: Any = ready.get()
            if isinstance(item, BaseException):
                raise item
            free.release()  # the one before is done with, and its buffer the next to be filled
            yield item
    finally:
        stop.set()
        free.release()
        thread.join()
