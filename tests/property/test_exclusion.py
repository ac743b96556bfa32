"""Target pairs stay out of message passing, both directions, at every hop, before anything is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.data.batches import MicroBatch, Recipe
from horovod_trainer.data.exclusion import exclude_pairs, most_partners, no_exclusion
from horovod_trainer.data.gather import Aggregator, Features
from tests.graphs import AGGREGATORS, World, random_pairs, worlds
from tests.reference import check_micro_batch, drawn, first_hop, neighbour_sets, target_pairs

aggregators = st.sampled_from(AGGREGATORS)


def whole_epoch(recipe: Recipe, epoch: int = 0) -> list[MicroBatch]:
    schedule = recipe.schedule
    steps = range(schedule.steps_per_epoch)
    return [recipe.build(epoch, step, micro) for step in steps for micro in range(schedule.micro_batches)]


def received(batch: MicroBatch, hop: int, node: int) -> set[int]:
    """Return whom a node receives from in a block."""
    local = batch.nodes.tolist().index(node)
    return set(drawn(batch.blocks[hop], batch.nodes)[local])


@settings(max_examples=60, deadline=None)
@given(
    world=worlds(), fanouts=st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3), batch_size=st.integers(1, 8),
    shared=st.booleans(), stored=st.one_of(st.none(), aggregators), exclude=st.booleans(), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_micro_batches_are_what_the_rebuilt_graph_allows(
    world: World, fanouts: list[int], batch_size: int, shared: bool, stored: Aggregator | None, exclude: bool, seed: int
) -> None:
    recipe = world.recipe(
        batch_size=batch_size, micro_batches=2, fanouts=tuple(fanouts), stored=stored, shared=shared, exclude=exclude,
        seed=seed,
    )  # fmt: skip
    for batch in whole_epoch(recipe):
        check_micro_batch(recipe, batch)
        pairs = {frozenset(pair) for pair in target_pairs(batch)}
        assert batch.excluded_pairs == (len(pairs) if exclude else 0)


@settings(max_examples=25, deadline=None)
@given(world=worlds(years=True), batch_size=st.integers(1, 8), exclude=st.booleans())
def test_exclusion_and_time_filter_together(world: World, batch_size: int, exclude: bool) -> None:
    recipe = world.recipe(batch_size=batch_size, fanouts=(2, -1, 1), not_later=True, exclude=exclude)
    for batch in whole_epoch(recipe):
        check_micro_batch(recipe, batch)


@pytest.mark.parametrize("stored", [None, *AGGREGATORS])
def test_degree_one_endpoints_are_left_with_nothing(stored: Aggregator | None) -> None:
    recipe = World(4, [(0, 1)]).recipe(batch_size=1, fanouts=(5, 5), stored=stored)
    batch = recipe.build(0, 0, 0)
    check_micro_batch(recipe, batch)
    assert batch.nodes[:2].tolist() == [0, 1]
    for block in batch.blocks:
        assert len(block.cols) == 0
        assert not block.remaining.any()
    if batch.stored_first_hop:
        assert not batch.dense()[:, batch.inputs.shape[1] // 2 :].any()


@pytest.mark.parametrize("stored", [None, *AGGREGATORS])
def test_two_seeds_that_share_an_endpoint_lose_both_pairs(stored: Aggregator | None) -> None:
    recipe = World(4, [(0, 1), (0, 2)]).recipe(batch_size=2, fanouts=(-1, -1), stored=stored)
    (batch,) = whole_epoch(recipe)
    assert batch.excluded_pairs == 2
    assert all(received(batch, 0, node) == set() for node in (0, 1, 2))
    check_micro_batch(recipe, batch)


@pytest.mark.parametrize("stored", [None, *AGGREGATORS])
def test_a_reciprocal_citation_is_one_pair(stored: Aggregator | None) -> None:
    """Either seed alone takes the undirected edge out; together they still count one pair."""
    world = World(4, [(0, 1), (1, 0), (0, 2), (1, 2)])
    alone = world.recipe(batch_size=1, stored=stored)
    for batch in whole_epoch(alone):
        check_micro_batch(alone, batch)
        u, v = target_pairs(batch)[0]
        assert v not in received(batch, 0, u)
        assert u not in received(batch, 0, v)
    (together,) = whole_epoch(world.recipe(batch_size=4, stored=stored))
    assert together.excluded_pairs == 3
    assert len(together.blocks[0].cols) == 0


def test_an_endpoint_met_again_at_hop_two_still_lacks_its_pair() -> None:
    """0 - 2 - 1 and the target 0 - 1: at hop two, 0 and 1 are back as destinations, without each other."""
    recipe = World(3, [(0, 1), (0, 2), (1, 2)]).recipe(batch_size=1, fanouts=(-1, -1, -1))
    for batch in whole_epoch(recipe):
        (pair,) = target_pairs(batch)
        for hop in range(3):
            assert pair[1] not in received(batch, hop, pair[0])
            assert pair[0] not in received(batch, hop, pair[1])
        check_micro_batch(recipe, batch)


@pytest.mark.parametrize("stored", [None, *AGGREGATORS])
def test_a_hub_with_fifty_excluded_draws_among_the_others(stored: Aggregator | None) -> None:
    edges = [(leaf, 0) for leaf in range(1, 121)]
    recipe = World(121, edges).recipe(batch_size=50, fanouts=(70, 10), stored=stored, width=4)
    for batch in whole_epoch(recipe):
        hub = batch.nodes.tolist().index(0)
        away = {leaf for leaf, _ in target_pairs(batch)}
        assert len(away) == batch.excluded_pairs == min(50, len(batch.source))
        assert batch.blocks[0].remaining[hub] == 120 - len(away)
        assert len(drawn(batch.blocks[0], batch.nodes)[hub]) == min(70, 120 - len(away))
        check_micro_batch(recipe, batch)


def test_a_pair_twice_in_a_batch_is_excluded_once() -> None:
    nodes = np.array([7, 3, 5], np.int32)
    exclusion = exclude_pairs(nodes, np.array([0, 0, 1, 2]), np.array([1, 1, 0, 2]), 10)
    assert exclusion.indptr.tolist() == [0, 1, 2, 3]
    assert exclusion.partners.tolist() == [3, 7, 5]
    assert exclusion.pairs == 2  # {3, 7}, and the loop at 5
    assert most_partners(exclusion) == 1
    assert most_partners(no_exclusion()) == 1
    world = World(4, [(0, 1), (0, 1), (1, 0), (0, 2)])
    recipe = world.recipe(batch_size=4, stored="sum")
    (batch,) = whole_epoch(recipe)
    assert batch.excluded_pairs == 2
    check_micro_batch(recipe, batch)


def test_partners_ascend_within_a_node_whatever_the_local_order() -> None:
    nodes = np.array([9, 2, 30, 1, 0], np.int32)
    exclusion = exclude_pairs(nodes, np.array([0, 0, 0, 0]), np.array([1, 2, 3, 4]), 31)
    assert exclusion.partners[:4].tolist() == [0, 1, 2, 30]
    assert exclusion.indptr.tolist() == [0, 4, 5, 6, 7, 8]


def test_target_pairs_that_are_no_graph_edges_take_nothing_away() -> None:
    """Seeds need not be edges of the graph; excluding them must not eat a neighbour."""
    world = World(6, [(0, 1), (0, 3), (0, 5)])
    graph = world.graph()
    nodes = np.array([0, 2, 4], np.int32)
    exclusion = exclude_pairs(nodes, np.array([0, 0]), np.array([1, 2]), 6)
    inputs = np.arange(6, dtype=np.float32)[:, None]
    total = np.array([[9.0], [0], [0], [0], [0], [0]], np.float32)
    got = Features(inputs, total).neighbourhood(graph, nodes, exclusion, "mean")
    assert got.tolist() == [[3.0], [0.0], [0.0]]


def test_switched_off_the_model_sees_its_targets() -> None:
    recipe = World(3, [(0, 1), (1, 2)]).recipe(batch_size=2, fanouts=(-1,), exclude=False)
    (batch,) = whole_epoch(recipe)
    assert batch.excluded_pairs == 0
    assert received(batch, 0, 1) == {0, 2}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), aggregator=aggregators, half=st.booleans(), data=st.data())
def test_first_hop_arithmetic_equals_the_rebuilt_graph(
    seed: int, aggregator: Aggregator, half: bool, data: st.DataObject
) -> None:
    world = World(30, random_pairs(seed, 30, 80))
    recipe = world.recipe(batch_size=1, width=5, seed=seed)
    graph, features = recipe.graph, recipe.features
    if half:  # what a float16 store holds: rounded inputs, float32 aggregates of the rounded ones
        values = features.values.astype(np.float16)
        rows = neighbour_sets(graph)
        aggregates = [first_hop(rows, values, kind).astype(np.float32) for kind in ("sum", "max")]
        features = Features(values, *aggregates)
    pairs = data.draw(st.lists(st.sampled_from(world.edges), max_size=25))
    nodes = np.array(list(dict.fromkeys([node for pair in pairs for node in pair] + list(range(30)))), np.int32)
    local = {int(node): number for number, node in enumerate(nodes)}
    ends = [np.array([local[pair[side]] for pair in pairs], np.int64) for side in (0, 1)]
    exclusion = exclude_pairs(nodes, ends[0], ends[1], 30)
    got = features.neighbourhood(graph, nodes, exclusion, aggregator)
    rows = neighbour_sets(graph, pairs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, first_hop(rows, features.values, aggregator)[nodes], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(features.rows(nodes), features.values[nodes].astype(np.float32))
    empty = [number for number, node in enumerate(nodes) if not rows[node]]
    assert not got[empty].any()


def test_nothing_left_is_exactly_zero_even_when_subtraction_is_not() -> None:
    """0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not 0 in float32; the neighbourhood must be."""
    world = World(4, [(0, 1), (0, 2), (0, 3)])
    values = np.array([[1.0], [0.1], [0.2], [0.3]], np.float32)
    total = np.array([[0.1 + 0.2 + 0.3 + 1e-7], [1], [1], [1]], np.float32)
    nodes = np.arange(4, dtype=np.int32)
    exclusion = exclude_pairs(nodes, np.zeros(3, np.int64), np.array([1, 2, 3]), 4)
    kinds: tuple[Aggregator, ...] = ("sum", "mean")
    for aggregator in kinds:
        got = Features(values, total).neighbourhood(world.graph(), nodes, exclusion, aggregator)
        assert not got.any()


def test_a_missing_aggregate_is_said() -> None:
    world = World(2, [(0, 1)])
    features = Features(np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="max"):
        features.neighbourhood(world.graph(), np.zeros(1, np.int32), no_exclusion(), "max")


def test_the_constant_input_sums_to_the_degree() -> None:
    graph = World(4, [(0, 1), (0, 2)]).graph()
    features = Features.constant(graph)
    nodes = np.arange(4, dtype=np.int32)
    assert features.width == 1
    assert features.rows(nodes).tolist() == [[1.0]] * 4
    want = {"sum": [2.0, 1.0, 1.0, 0.0], "mean": [1.0, 1.0, 1.0, 0.0], "max": [1.0, 1.0, 1.0, 0.0]}
    for aggregator in AGGREGATORS:
        got = features.neighbourhood(graph, nodes, no_exclusion(), aggregator)
        assert got.ravel().tolist() == want[aggregator]
