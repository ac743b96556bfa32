"""Small graphs for tests: makers, hypothesis strategies, and one of four nodes solved by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_trainer.data.batches import Recipe, Schedule
from horovod_trainer.data.gather import Aggregator, Features
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.sampler import Graph

Pairs = list[tuple[int, int]]
AGGREGATORS: tuple[Aggregator, ...] = ("mean", "sum", "max")

# Node 0 is cited by 1, 2 and 3, and 1 cites 2:  1 -- 0, 2 -- 0, 3 -- 0, 1 -- 2.
FOUR: Pairs = [(1, 0), (2, 0), (3, 0), (1, 2)]
FOUR_INPUT = np.array([[1.0], [2.0], [4.0], [8.0]], np.float32)
FOUR_SUM = [14.0, 5.0, 3.0, 1.0]
FOUR_MEAN = [14.0 / 3.0, 2.5, 1.5, 1.0]
FOUR_MAX = [8.0, 4.0, 2.0, 1.0]


def csr(num_nodes: int, pairs: Iterable[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return (indptr, indices) with one entry u -> v per distinct pair (u, v), rows ascending."""
    rows: list[set[int]] = [set() for _ in range(num_nodes)]
    for u, v in pairs:
        rows[u].add(v)
    indptr = np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)
    return indptr, np.array([v for row in rows for v in sorted(row)], np.int32)


def graph_of(
    num_nodes: int, pairs: Iterable[tuple[int, int]], year: list[int] | None = None, not_later: bool = False
) -> Graph:
    """Return the symmetric message-passing graph of pairs, self-loops left out."""
    both = [edge for u, v in pairs if u != v for edge in ((u, v), (v, u))]
    indptr, indices = csr(num_nodes, both)
    return Graph(indptr, indices, None if year is None else np.array(year, np.int32), not_later)


def features_of(graph: Graph, values: NDArray[np.float32]) -> Features:
    """Return the inputs with the neighbour aggregates a store would hold (summed in float64)."""
    total, most = np.zeros(values.shape, np.float32), np.zeros(values.shape, np.float32)
    for node in range(graph.num_nodes):
        row = values[graph.indices[graph.indptr[node] : graph.indptr[node + 1]]]
        total[node] = row.sum(0, dtype=np.float64)
        if len(row):
            most[node] = row.max(0)
    return Features(values, total, most)


def random_pairs(seed: int, num_nodes: int, count: int) -> Pairs:
    """Return distinct directed pairs without self-loops; low ids are hubs."""
    rng = np.random.default_rng(seed)
    u = rng.integers(0, num_nodes, 4 * count)
    v = (num_nodes * rng.random(4 * count) ** 2).astype(np.int64)
    return list(dict.fromkeys((int(a), int(b)) for a, b in zip(u, v, strict=True) if a != b))[:count]


@dataclass(frozen=True)
class World:
    """Training citations (source cites target) on `num_nodes` nodes, perhaps with years."""

    num_nodes: int
    edges: Pairs
    year: list[int] | None = None

    def graph(self, not_later: bool = False) -> Graph:
        """Return the message-passing graph; a world without years has no later ones to leave out."""
        return graph_of(self.num_nodes, self.edges, self.year, not_later and self.year is not None)

    def candidates(self) -> Candidates:
        year = None if self.year is None else np.array(self.year, np.int32)
        return Candidates.build(*csr(self.num_nodes, self.edges), year)

    def recipe(
        self,
        *,
        batch_size: int,
        micro_batches: int = 1,
        fanouts: tuple[int, ...] = (-1, -1),
        stored: Aggregator | None = None,
        shared: bool = False,
        negatives: int = 2,
        exclude: bool = True,
        not_later: bool = False,
        width: int = 3,
        seed: int = 0,
    ) -> Recipe:
        """Return a recipe over all edges with normal random inputs of `width` features."""
        graph = self.graph(not_later)
        values = np.random.default_rng(seed).normal(size=(self.num_nodes, width)).astype(np.float32)
        ends = np.array(self.edges, np.int32).reshape(-1, 2)
        return Recipe(
            Schedule(seed, len(ends), batch_size, micro_batches), graph, ends[:, 0].copy(), ends[:, 1].copy(),
            self.candidates(), features_of(graph, values), fanouts, negatives, shared, exclude, stored,
        )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn, years: bool | None = None, most_nodes: int = 9) -> World:
    """Draw a world of 2 to most_nodes nodes with 1 to 20 citations: degree 1, hubs, reciprocal pairs all happen."""
    num_nodes = draw(st.integers(2, most_nodes))
    node = st.integers(0, num_nodes - 1)
    pair = st.tuples(node, node).filter(lambda edge: edge[0] != edge[1])
    edges = draw(st.lists(pair, min_size=1, max_size=20, unique=True))
    has_years = draw(st.booleans()) if years is None else years
    year = draw(st.lists(st.integers(2000, 2004), min_size=num_nodes, max_size=num_nodes)) if has_years else None
    return World(num_nodes, edges, year)
