"""Negatives: who may be drawn, who is masked, and what is counted, against the definition in plain python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.data.negatives import Candidates, Negatives, draw_shared, draw_uniform
from tests.graphs import World, csr, worlds


def ids(*nodes: int) -> np.ndarray:
    return np.array(nodes, np.int32)


def check(world: World, source: np.ndarray, target: np.ndarray, got: Negatives) -> None:
    """Assert masks and counts: masked are exactly {later, positive, self, the source's training citations}."""
    cited = [{v for u, v in world.edges if u == node} for node in range(world.num_nodes)]
    citing = 0
    for i, (u, v) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        tails = got.tails if got.shared else got.tails[i]
        for j, tail in enumerate(tails.tolist()):
            assert 0 <= tail < world.num_nodes
            later = world.year is not None and world.year[tail] > world.year[u]
            citing += tail in cited[u]
            assert got.valid[i, j] == (not later and tail not in {u, v} | cited[u])
    assert got.citing == citing
    assert got.drawn == got.valid.size


@settings(max_examples=60, deadline=None)
@given(world=worlds(), shared=st.booleans(), count=st.integers(1, 12), key=st.integers(0, 2**64 - 1), data=st.data())
def test_masks_are_exactly_the_definition(
    world: World, shared: bool, count: int, key: int, data: st.DataObject
) -> None:
    """Positives need not be training citations: a held-out or made-up one is masked for its own row all the same."""
    node = st.integers(0, world.num_nodes - 1)
    positives = data.draw(st.lists(st.one_of(st.sampled_from(world.edges), st.tuples(node, node)), max_size=8))
    source, target = ids(*(u for u, _ in positives)), ids(*(v for _, v in positives))
    draw = draw_shared if shared else draw_uniform
    got = draw(world.candidates(), source, target, count, key)
    assert got.shared == shared
    assert got.tails.shape == ((count,) if shared else (len(positives), count))
    assert got.valid.shape == (len(positives), count)
    assert got.tails.dtype == np.int32
    check(world, source, target, got)
    if world.year is not None and positives:
        year = np.array(world.year)
        limit = year[source].max() if shared else year[source][:, None]
        assert (year[got.tails] <= limit).all(), "drawn from what the (latest) source may cite"
    again = draw(world.candidates(), source, target, count, key)
    np.testing.assert_array_equal(got.tails, again.tails)


def test_duplicates_in_a_shared_pool_are_masked_and_counted_each() -> None:
    world = World(3, [(0, 1)])
    got = draw_shared(world.candidates(), ids(0, 2), ids(1, 0), 40, 9)
    assert len(set(got.tails.tolist())) < 40
    check(world, ids(0, 2), ids(1, 0), got)
    assert got.citing == int((got.tails == 1).sum())
    np.testing.assert_array_equal(got.valid[0], got.tails == 2)
    np.testing.assert_array_equal(got.valid[1], got.tails == 1)


@pytest.mark.parametrize("shared", [False, True])
def test_every_candidate_is_drawn_equally_often(shared: bool) -> None:
    """Source 5 (2003) may cite nodes 0..7 (<= 2003), never 8 and 9 (2010); chi-square with 7 degrees of freedom."""
    year = [2000, 2003, 2001, 2000, 2002, 2003, 2003, 2003, 2010, 2010]
    candidates = World(10, [(5, 0)], year).candidates()
    if shared:
        tails = draw_shared(candidates, ids(5), ids(0), 8000, 4).tails
    else:
        tails = draw_uniform(candidates, ids(*[5] * 400), ids(*[0] * 400), 20, 4).tails
    counts = np.bincount(tails.ravel(), minlength=10)
    assert counts[8:].tolist() == [0, 0]
    assert ((counts[:8] - 1000) ** 2 / 1000).sum() < 24.3  # the 0.999 quantile


def test_rows_and_columns_draw_different_tails() -> None:
    candidates = World(1000, [(0, 1)]).candidates()
    tails = draw_uniform(candidates, ids(0, 0, 0), ids(1, 1, 1), 30, 8).tails
    assert len(np.unique(tails)) > 75
    other = draw_uniform(candidates, ids(0, 0, 0), ids(1, 1, 1), 30, 9).tails
    assert (tails != other).mean() > 0.95


def test_the_earliest_year_and_gaps_between_years() -> None:
    """Node 0 is alone in its year: its only candidate is itself, so nothing is valid and nothing breaks."""
    world = World(4, [(1, 0)], [-5, 1990, 2020, 2020])
    candidates = world.candidates()
    assert candidates.limits(ids(0, 1, 2, 3)).tolist() == [1, 2, 4, 4]
    got = draw_uniform(candidates, ids(0), ids(1), 6, 2)
    assert set(got.tails.ravel().tolist()) == {0}
    assert not got.valid.any()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("year", [None, [2000, 2001, 2002]])
def test_no_positives_no_negatives(shared: bool, year: list[int] | None) -> None:
    draw = draw_shared if shared else draw_uniform
    got = draw(World(3, [(0, 1)], year).candidates(), ids(), ids(), 4, 1)
    assert got.valid.shape == (0, 4)
    assert (got.drawn, got.citing) == (0, 0)


def test_candidates_of_an_undirected_graph_count_both_ends() -> None:
    """Where links have no direction, what counts as a training citation is the symmetric graph."""
    indptr, citing = csr(3, [(0, 1), (1, 0)])
    got = draw_uniform(Candidates.build(indptr, citing, None), ids(1), ids(2), 60, 3)
    np.testing.assert_array_equal(got.valid, np.zeros_like(got.valid))
    assert got.citing == int((got.tails == 0).sum())
