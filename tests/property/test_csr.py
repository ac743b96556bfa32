"""Counting-sort graphs against what sorting keys gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_trainer.data import csr

Case = tuple[int, NDArray[np.int64]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a number of nodes and pairs [2, E], perhaps none, with self-loops, repeats and nodes without any."""
    n = draw(st.integers(1, 12))
    node = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=40))
    if draw(st.booleans()):
        pairs.sort()  # these take the short way
    return n, np.array(pairs, np.int64).reshape(-1, 2).T


def by_keys(pairs: NDArray[Any], n: int, *, distinct: bool) -> list[list[int]]:
    """Return the pairs sorted, as [[rows], [entries]]."""
    keys = pairs[0] * n + pairs[1]
    keys = np.unique(keys) if distinct else np.sort(keys)
    return [list(part) for part in np.divmod(keys, n)]


def check(graph: csr.Csr, n: int, expected: list[list[int]]) -> None:
    assert graph.pairs().tolist() == expected
    assert graph.num_nodes == n
    assert graph.indptr.dtype == np.int64
    assert graph.indices.dtype == graph.rows().dtype == np.int32
    assert np.array_equal(np.diff(graph.indptr), np.bincount(np.array(expected[0], int), minlength=n))


@settings(max_examples=200, deadline=None)
@given(case=cases(), dtype=st.sampled_from([np.int32, np.int64]))
def test_rows_are_what_a_sort_gives(case: Case, dtype: type[np.integer[Any]]) -> None:
    n, pairs = case
    graph = csr.from_pairs(pairs.astype(dtype), n)
    check(graph, n, by_keys(pairs, n, distinct=False))
    check(csr.transposed(graph), n, by_keys(pairs[::-1], n, distinct=False))


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_what_is_dropped_and_what_is_joined(case: Case) -> None:
    n, pairs = case
    proper = pairs[:, pairs[0] != pairs[1]]
    graph, loops, repeats = csr.distinct(csr.from_pairs(pairs, n))
    check(graph, n, by_keys(proper, n, distinct=True))
    assert loops == pairs.shape[1] - proper.shape[1]
    assert loops + repeats + len(graph.indices) == pairs.shape[1]
    both = np.concatenate([proper, proper[::-1]], axis=1)
    check(csr.symmetric(graph), n, by_keys(both, n, distinct=True))
    check(csr.unordered(graph), n, by_keys(np.sort(proper, axis=0), n, distinct=True))


@settings(max_examples=100, deadline=None)
@given(case=cases(), data=st.data())
def test_pairs_are_found_where_they_stand(case: Case, data: st.DataObject) -> None:
    n, pairs = case
    graph, _, _ = csr.distinct(csr.from_pairs(pairs, n))
    node = st.integers(0, n - 1)
    asked = np.array(data.draw(st.lists(st.tuples(node, node), max_size=20)), np.int32).reshape(-1, 2).T
    known = [tuple(pair) for pair in graph.pairs().T.tolist()]
    expected = [known.index(pair) if pair in known else -1 for pair in map(tuple, asked.T.tolist())]
    assert graph.positions(*asked).tolist() == expected
