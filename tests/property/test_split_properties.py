"""Splits of arbitrary small graphs: a partition, no leak, clean negatives, nothing but the seed."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.data.graph import RawGraph, Split, cleaned
from horovod_trainer.data.splits import make_split
from horovod_trainer.errors import InvalidInput
from tests.raw import raw_graph

Pairs = set[tuple[int, int]]


@st.composite
def graphs(draw: st.DrawFn) -> RawGraph:
    """Draw graphs with hubs, reciprocal edges, duplicates, self-loops, isolated nodes, with years or without."""
    n = draw(st.integers(6, 30))
    node = st.integers(0, n - 1)
    edges = draw(st.lists(st.tuples(node, node), min_size=6, max_size=90))
    edges += [(v, u) for u, v in draw(st.lists(st.sampled_from(edges), max_size=10))]
    year = draw(st.none() | st.lists(st.integers(2000, 2004), min_size=n, max_size=n))
    directed = draw(st.booleans())
    graph = raw_graph(n, edges, directed=directed, year=None if year is None else np.array(year))
    assume(any(u != v for u, v in edges))
    return cleaned(graph)[0]


def pairs(edges: NDArray[np.generic]) -> Pairs:
    return {(int(u), int(v)) for u, v in edges}


def split_or_none(graph: RawGraph, config: DataSection) -> Split | None:
    try:
        return make_split(graph, config)[0]
    except InvalidInput:  # too few edges, sources or candidates; that those are refused is a unit test
        return None


def both(edges: Pairs) -> Pairs:
    return edges | {(v, u) for u, v in edges}


@settings(max_examples=150, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 2**32), fraction=st.floats(0.0, 0.3))
def test_splits_are_partitions_without_leaks(graph: RawGraph, seed: int, fraction: float) -> None:
    config = DataSection(negatives=2, split_seed=seed, valid_fraction=fraction, test_fraction=fraction)
    split = split_or_none(graph, config)
    if split is None:
        return
    true = pairs(graph.edges.T) if graph.directed else both(pairs(graph.edges.T))
    train, valid, test = pairs(split.train.T), pairs(split.valid.edge), pairs(split.test.edge)
    assert train
    assert valid
    assert test
    assert len(train) + len(valid) + len(test) == graph.edges.shape[1]
    assert not both(train) & both(valid | test)
    assert not both(valid) & both(test)
    assert train | valid | test == true if graph.directed else both(train | valid | test) == true
    for held_out in (split.valid, split.test):
        assert held_out.negatives is not None
        for (u, v), row in zip(held_out.edge.tolist(), held_out.negatives.tolist(), strict=True):
            assert u != v
            for tail in row:
                assert tail != u
                assert (u, tail) not in true
                assert graph.year is None or graph.year[tail] <= graph.year[u]


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 100))
def test_splits_depend_on_the_seed_alone(graph: RawGraph, seed: int) -> None:
    config = DataSection(negatives=2, split_seed=seed, valid_fraction=0.2, test_fraction=0.2)
    first, second = split_or_none(graph, config), split_or_none(graph, config)
    if first is None or second is None:
        assert first is second
        return
    assert np.array_equal(first.train, second.train)
    for a, b in ((first.valid, second.valid), (first.test, second.test)):
        assert np.array_equal(a.edge, b.edge)
        assert a.negatives is not None
        assert b.negatives is not None
        assert np.array_equal(a.negatives, b.negatives)
