"""The slow, obvious way to compute what the kernels compute: rebuild the graph without the pairs, then look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.batches import MicroBatch, Recipe
from horovod_trainer.data.gather import Aggregator
from horovod_trainer.data.sampler import Block, Graph
from horovod_trainer.model import Encoder

Floats = NDArray[np.float64]


def neighbour_sets(graph: Graph, without: Iterable[tuple[int, int]] = ()) -> list[set[int]]:
    """Return who sends to each node in the graph rebuilt without the pairs, either way, and without later senders."""
    gone = {frozenset(pair) for pair in without}
    rows: list[set[int]] = []
    for node in range(graph.num_nodes):
        row = {int(n) for n in graph.indices[graph.indptr[node] : graph.indptr[node + 1]]}
        row = {n for n in row if frozenset((node, n)) not in gone}
        if graph.not_later and graph.year is not None:
            row = {n for n in row if graph.year[n] <= graph.year[node]}
        rows.append(row)
    return rows


def first_hop(rows: list[set[int]], values: NDArray[Any], aggregator: Aggregator) -> Floats:
    """Return the aggregate of every node's senders, float64 [N, F]; 0 where there are none."""
    out = np.zeros(values.shape, np.float64)
    for node, row in enumerate(rows):
        if row:
            sent = values[sorted(row)].astype(np.float64)
            out[node] = sent.max(0) if aggregator == "max" else sent.sum(0) / (len(row) if aggregator == "mean" else 1)
    return out


def sage(encoder: Encoder, rows: list[set[int]], values: NDArray[np.float32]) -> Floats:
    """Return the GraphSAGE embeddings of all nodes over all senders, float64 [N, out], without dropout."""
    h = values.astype(np.float64)
    last = len(encoder.layers) - 1
    for number, layer in enumerate(encoder.layers):
        weights = {name: value.detach().numpy().astype(np.float64) for name, value in layer.named_parameters()}
        sent = first_hop(rows, h, encoder.aggregator)
        h = sent @ weights["neighbour.weight"].T + weights["neighbour.bias"] + h @ weights["own.weight"].T
        if layer.normalise:
            h = h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), 1e-12)
        if number != last:
            h = np.maximum(h, 0.0)
    return h


def target_pairs(batch: MicroBatch) -> list[tuple[int, int]]:
    """Return the micro-batch's seed edges as global ids."""
    return [(int(batch.nodes[u]), int(batch.nodes[v])) for u, v in zip(batch.source, batch.target, strict=True)]


def drawn(block: Block, nodes: NDArray[np.int32]) -> list[list[int]]:
    """Return the global ids that each destination of a block receives from."""
    return [[int(nodes[c]) for c in block.cols[block.indptr[d] : block.indptr[d + 1]]] for d in range(block.num_dst)]


def check_micro_batch(recipe: Recipe, batch: MicroBatch) -> None:
    """Assert that every block and the first hop of a micro-batch are what the rebuilt graph allows."""
    rows = neighbour_sets(recipe.graph, target_pairs(batch) if recipe.exclude_targets else ())
    nodes = batch.nodes
    assert len(set(nodes.tolist())) == len(nodes)
    seeds = len({*batch.source.tolist(), *batch.target.tolist(), *batch.tails.ravel().tolist()})
    assert len(batch.blocks) == len(recipe.hops)
    for block, fanout in zip(batch.blocks, recipe.hops, strict=True):
        assert block.num_dst == seeds
        for d, got in enumerate(drawn(block, nodes)):
            allowed = rows[nodes[d]]
            assert len(got) == len(set(got)), "a neighbour was drawn twice"
            assert set(got) <= allowed, "an excluded or later neighbour was drawn"
            assert len(got) == (len(allowed) if fanout == -1 else min(fanout, len(allowed)))
            assert block.remaining[d] == len(allowed)
        assert block.num_src <= len(nodes)
        seeds = block.num_src
    assert seeds == len(nodes)
    width = recipe.features.width
    np.testing.assert_array_equal(batch.dense()[:, :width], recipe.features.values[nodes].astype(np.float32))
    if recipe.stored_first_hop is None:
        assert batch.inputs.shape[1] == width
        return
    stored = batch.dense()[:, width:]
    want = first_hop(rows, recipe.features.values, recipe.stored_first_hop)[nodes]
    np.testing.assert_allclose(stored, want, rtol=1e-5, atol=1e-5)
    for local, node in enumerate(nodes):
        if not rows[node]:
            assert not stored[local].any(), "exactly 0 when nothing is left"
