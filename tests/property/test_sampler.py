"""Neighbour sampling: distinct, uniform draws from what remains, the same wherever and whenever they are made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.counters import derive_key
from horovod_trainer.data.exclusion import Exclusion, exclude_pairs, no_exclusion
from horovod_trainer.data.sampler import ALL, NodeTable, draw_neighbours, sample_blocks
from tests.graphs import World, graph_of, random_pairs, worlds
from tests.reference import drawn, neighbour_sets

fanouts = st.sampled_from([ALL, 1, 2, 3, 50])


def ids(*nodes: int) -> np.ndarray:
    return np.array(nodes, np.int32)


@settings(max_examples=60, deadline=None)
@given(
    world=worlds(),
    not_later=st.booleans(),
    hops=st.lists(fanouts, max_size=3),
    key=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_blocks_hold_what_the_rebuilt_graph_allows(
    world: World, not_later: bool, hops: list[int], key: int, data: st.DataObject
) -> None:
    graph = world.graph(not_later)
    pairs = data.draw(st.lists(st.sampled_from(world.edges), max_size=6))
    ends = list(dict.fromkeys(node for pair in pairs for node in pair))
    others = data.draw(st.lists(st.integers(0, world.num_nodes - 1), unique=True))
    seeds = ids(*dict.fromkeys(ends + others))
    local = {node: number for number, node in enumerate(ends)}
    source = np.array([local[u] for u, _ in pairs], np.int64)
    target = np.array([local[v] for _, v in pairs], np.int64)
    exclusion = exclude_pairs(seeds, source, target, graph.num_nodes)
    nodes, blocks = sample_blocks(graph, seeds, exclusion, tuple(hops), key)

    rows = neighbour_sets(graph, pairs)
    np.testing.assert_array_equal(nodes[: len(seeds)], seeds)
    assert len(set(nodes.tolist())) == len(nodes)
    reached = len(seeds)
    for block, fanout in zip(blocks, hops, strict=True):
        assert block.num_dst == reached
        reached = block.num_src
        for d, got in enumerate(drawn(block, nodes)):
            allowed = rows[nodes[d]]
            assert len(set(got)) == len(got)
            assert set(got) <= allowed
            assert len(got) == (len(allowed) if fanout == ALL else min(fanout, len(allowed)))
            assert block.remaining[d] == len(allowed)
    assert reached == len(nodes)


@settings(max_examples=30, deadline=None)
@given(world=worlds(), fanout=fanouts, key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_node_draws_the_same_whoever_is_with_it(world: World, fanout: int, key: int, data: st.DataObject) -> None:
    graph = world.graph()
    company = ids(*data.draw(st.permutations(range(world.num_nodes))))
    indptr, neighbours, _ = draw_neighbours(graph, company, no_exclusion(), fanout, key)
    for position, node in enumerate(company):
        _, alone, _ = draw_neighbours(graph, ids(int(node)), no_exclusion(), fanout, key)
        np.testing.assert_array_equal(neighbours[indptr[position] : indptr[position + 1]], alone)


def hub() -> tuple[World, Exclusion]:
    """Node 0 with neighbours 1..20, of which 3, 7, 8, 19 and 20 are excluded: 15 remain."""
    world = World(21, [(0, other) for other in range(1, 21)])
    away = np.array([3, 7, 8, 19, 20], np.int64)
    return world, exclude_pairs(np.arange(21, dtype=np.int32), np.zeros(5, np.int64), away, 21)


@pytest.mark.parametrize("with_years", [False, True])
def test_what_remains_is_drawn_uniformly_one_by_one_and_in_pairs(with_years: bool) -> None:
    world, exclusion = hub()
    graph = graph_of(21, world.edges, [2000] * 21, not_later=with_years)
    rounds, take = 2500, 4
    single, double = np.zeros(21), np.zeros((21, 21))
    for number in range(rounds):
        _, got, remaining = draw_neighbours(graph, ids(0), exclusion, take, derive_key(3, number))
        assert remaining[0] == 15
        assert len(got) == take
        single[got] += 1
        double[np.ix_(got, got)] += 1
    assert not single[[0, 3, 7, 8, 19, 20]].any()
    left = np.setdiff1d(np.arange(1, 21), [3, 7, 8, 19, 20])
    share = take / 15
    expected = rounds * share
    # inclusion counts without replacement: variance n p (1 - p), correlated by the fixed sum; 14 degrees of freedom
    statistic = ((single[left] - expected) ** 2).sum() / (expected * (1 - share)) * 14 / 15
    assert statistic < 36.1  # the 0.999 quantile
    together = double[np.ix_(left, left)][np.triu_indices(15, 1)]
    expected_pair = rounds * take * (take - 1) / (15 * 14)
    assert abs(together - expected_pair).max() < 5 * np.sqrt(expected_pair)


def test_hops_and_nodes_draw_independently() -> None:
    """Two nodes with the same neighbours, and two hops of one node, agree no more often than chance."""
    world = World(12, [(a, b) for a in (0, 1) for b in range(2, 12)])
    graph = world.graph()
    same_node = same_hop = 0
    for number in range(2000):
        nodes, blocks = sample_blocks(graph, ids(0, 1), no_exclusion(), (1, 1), derive_key(11, number))
        first, second = (drawn(block, nodes) for block in blocks)
        same_node += int(first[0] == first[1])
        same_hop += int(first[0] == second[0])
    assert abs(same_node - 200) < 60  # 4.5 standard deviations
    assert abs(same_hop - 200) < 60


def test_threads_do_not_change_draws() -> None:
    graph = graph_of(300, random_pairs(0, 300, 1500))
    seeds = np.arange(0, 300, 3, dtype=np.int32)

    def sample(key: int) -> tuple[np.ndarray, list[np.ndarray]]:
        nodes, blocks = sample_blocks(graph, seeds, no_exclusion(), (4, 3), key)
        return nodes, [block.cols for block in blocks]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sample, range(20)))
    for key in reversed(range(20)):
        nodes, cols = sample(key)
        np.testing.assert_array_equal(together[key][0], nodes)
        for a, b in zip(together[key][1], cols, strict=True):
            np.testing.assert_array_equal(a, b)


def test_nothing_comes_of_isolated_nodes_and_of_no_nodes() -> None:
    graph = graph_of(5, [(0, 1)])
    nodes, (block,) = sample_blocks(graph, ids(4, 3), no_exclusion(), (5,), 1)
    assert nodes.tolist() == [4, 3]
    assert (block.num_dst, block.num_src, len(block.cols)) == (2, 2, 0)
    assert block.remaining.tolist() == [0, 0]
    nodes, blocks = sample_blocks(graph, ids(), no_exclusion(), (5, ALL), 1)
    assert len(nodes) == 0
    assert [(block.num_dst, block.num_src, block.indptr.tolist()) for block in blocks] == [(0, 0, [0])] * 2


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**31 - 2)), max_size=60), min_size=1, max_size=6
    )
)
def test_node_table_numbers_ids_in_order_of_first_sight(calls: list[list[int]]) -> None:
    table = NodeTable(ids(*calls[0]))
    known = {node: number for number, node in enumerate(dict.fromkeys(calls[0]))}
    for call in calls[1:]:
        got = table.add(ids(*call))
        for node in call:
            known.setdefault(node, len(known))
        assert got.tolist() == [known[node] for node in call]
    assert table.nodes().tolist() == list(known)


def test_node_table_grows_past_many_collisions() -> None:
    many = (np.arange(20_000, dtype=np.int64) * 65_536 % (2**31 - 1)).astype(np.int32)
    table = NodeTable(many[:10])
    np.testing.assert_array_equal(table.add(many), np.arange(20_000))
    np.testing.assert_array_equal(table.nodes(), many)
