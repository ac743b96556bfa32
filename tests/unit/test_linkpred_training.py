"""What others' bug reports taught about training on links: each file states a behaviour, each test shows it here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_trainer.assemble import add_edges
from horovod_trainer.config import EvaluateSection
from horovod_trainer.data.batches import Schedule
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.negatives import draw_shared, draw_uniform
from horovod_trainer.data.sampler import sample_blocks
from tests.graphs import World, graph_of, random_pairs
from tests.reference import check_micro_batch, drawn, neighbour_sets

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "inputs" / "linkpred"

# The same cases, for a clone that stands alone.
CASES: dict[str, dict[str, Any]] = {
    "02": {"edges": [[1, 0], [2, 0], [3, 0], [4, 0], [0, 1], [0, 2], [0, 3], [0, 4]], "batch_edge_ids": [0]},
    "03": {
        "edge_index": [[1, 0, 1, 1, 2], [0, 1, 2, 0, 0]], "edge_time": [1, 2, 3, 4, 5], "seed_node": 1, "seed_time": 1,
    },
    "07": {"num_samples": 100, "ranks": 7, "batch_size": 3},
    "14": {"ranks": 4, "num_samples": 22},
}  # fmt: skip


def case(number: str) -> dict[str, Any]:
    """Return the case as its file states it, or our copy where the file is not there."""
    files = sorted(FOLDER.glob(f"{number}-*.json"))
    found: dict[str, Any] = json.loads(files[0].read_text()) if files else CASES[number]
    return found


@pytest.mark.parametrize("fanout", [-1, 1, 3, 4])
def test_02_target_edge_and_its_reverse_are_out_of_message_passing(fanout: int) -> None:
    given = case("02")
    (number,) = given["batch_edge_ids"]
    target_edge = tuple(given["edges"][number])
    assert target_edge == (1, 0)
    world = World(5, [(u, v) for u, v in given["edges"]])
    recipe = world.recipe(batch_size=1, fanouts=(fanout, fanout))
    position = recipe.schedule.edges(0, 0, 0)  # the first batch holds this edge; train on `target_edge` there instead
    recipe.edge_source[position], recipe.edge_target[position] = target_edge
    batch = recipe.build(0, 0, 0)
    local = batch.nodes.tolist()
    for block in batch.blocks:
        rows = drawn(block, batch.nodes)
        assert set(rows[local.index(0)]) <= {2, 3, 4}
        assert len(rows[local.index(0)]) == (3 if fanout == -1 else min(fanout, 3))
        assert rows[local.index(1)] == [], "node 1 keeps no incoming edge from 0"
    check_micro_batch(recipe, batch)


def test_03_no_sampled_edge_is_later_than_the_seed() -> None:
    """The file dates edges; here papers have years and an edge is as late as the later of its two papers.

    A node takes the year of its first edge; where an edge is later than both its nodes, a paper of that year stands in
    for the sender.
    """
    given = case("03")
    edges = list(zip(*given["edge_index"], given["edge_time"], strict=True))
    year: dict[Any, int] = {}
    for u, v, time in edges:
        year[u], year[v] = min(time, year.get(u, time)), min(time, year.get(v, time))
    assert year[given["seed_node"]] == given["seed_time"]
    sent = [(u if max(year[u], year[v]) == time else (u, time), v, time) for u, v, time in edges]
    year |= {u: time for u, v, time in sent if isinstance(u, tuple)}
    names = list(year)
    ids = {name: number for number, name in enumerate(names)}
    time_of = {frozenset((ids[u], ids[v])): time for u, v, time in sent}
    for u, v, time in sent:
        assert max(year[u], year[v]) == time
    graph = graph_of(len(names), [(ids[u], ids[v]) for u, v, _ in sent], [year[name] for name in names], not_later=True)
    seed = np.array([ids[given["seed_node"]]], np.int32)
    for fanouts in ((-1, -1, -1), (1, 1, 1), (2, 2, 2)):
        for key in range(20):
            nodes, blocks = sample_blocks(graph, seed, no_exclusion(), fanouts, key)
            for block in blocks:
                for d, row in enumerate(drawn(block, nodes)):
                    assert all(time_of[frozenset((int(nodes[d]), sender))] <= given["seed_time"] for sender in row)
    unfiltered = graph_of(len(names), [(ids[u], ids[v]) for u, v, _ in sent])
    _, blocks = sample_blocks(unfiltered, seed, no_exclusion(), (-1,), 0)
    assert len(blocks[0].cols) > 1, "without the filter, later edges are there to be drawn"


@pytest.mark.parametrize("exclude", [False, True])
def test_03_nothing_later_than_its_seed_reaches_it_at_any_hop(exclude: bool) -> None:
    years = [2000 + (node * 7) % 11 for node in range(40)]
    world = World(40, random_pairs(5, 40, 160), years)
    recipe = world.recipe(batch_size=1, fanouts=(3, -1, 2), not_later=True, exclude=exclude)
    for step in range(0, recipe.schedule.steps_per_epoch, 8):
        batch = recipe.build(0, step, 0)
        rows = [drawn(block, batch.nodes) for block in batch.blocks]
        local = {int(node): number for number, node in enumerate(batch.nodes)}
        for seed in batch.nodes[: batch.blocks[0].num_dst]:
            reach = {int(seed)}
            for hop in rows:
                reach |= {sender for node in reach if local[node] < len(hop) for sender in hop[local[node]]}
            assert max(years[node] for node in reach) <= years[seed]


def test_07_uneven_shares_take_the_same_number_of_steps() -> None:
    given = case("07")
    ranks, batch = given["ranks"], given["batch_size"]
    for micro_batches in (ranks, 2 * ranks, 5):
        schedule = Schedule(0, given["num_samples"], batch, micro_batches)
        seen = Counter[int]()
        steps = []
        for rank in range(ranks):
            for step in range(schedule.steps_per_epoch):
                for micro in schedule.share(rank, ranks):
                    seen.update(schedule.edges(3, step, micro).tolist())
            steps.append(schedule.steps_per_epoch)
        assert len(set(steps)) == 1
        assert seen == Counter(range(given["num_samples"])), "nothing dropped, nothing repeated"
    assert Schedule(0, given["num_samples"], batch, ranks).steps_per_epoch == 5


@pytest.mark.parametrize("shared", [False, True])
def test_10_held_out_edges_may_be_drawn_as_negatives(shared: bool) -> None:
    """Rejecting them would tell the model which they are: 0 -> 9 is held out and comes as often as any other tail."""
    world = World(10, [(0, tail) for tail in range(1, 5)])
    draw = draw_shared if shared else draw_uniform
    source, target = np.zeros(200, np.int32), np.ones(200, np.int32)
    count = 4000 if shared else 20
    got = draw(world.candidates(), source, target, count, 1)
    tails = np.broadcast_to(got.tails, got.valid.shape)
    counts = np.bincount(tails[got.valid].ravel(), minlength=10)
    assert counts[:5].tolist() == [0] * 5, "itself, its positive and its training citations are no negatives"
    held_out, others = counts[9], counts[5:9]
    assert abs(held_out - others.mean()) < 0.2 * others.mean()


def test_12_the_rate_of_true_edges_among_negatives_is_measured() -> None:
    """Source 0 cites 30 of 100 papers: of its uniform draws 30 % are true edges, counted and masked."""
    world = World(100, [(0, tail) for tail in range(1, 31)])
    got = draw_uniform(world.candidates(), np.zeros(100, np.int32), np.ones(100, np.int32), 100, 2)
    assert got.drawn == 10_000
    assert got.citing == int(((got.tails >= 1) & (got.tails <= 30)).sum())
    assert abs(got.citing / got.drawn - 0.3) < 0.02
    assert got.valid.sum() == got.drawn - got.citing - int((got.tails == 0).sum())


def test_14_the_order_changes_each_epoch_and_all_ranks_agree() -> None:
    given = case("14")
    ranks, samples = given["ranks"], given["num_samples"]

    def order(rank_view: Schedule, epoch: int) -> list[int]:
        steps = range(rank_view.steps_per_epoch)
        micros = range(rank_view.micro_batches)
        return [int(e) for step in steps for micro in micros for e in rank_view.edges(epoch, step, micro)]

    views = [Schedule(9, samples, 2, ranks) for _ in range(ranks)]  # every rank builds its own
    epochs = [order(views[0], epoch) for epoch in range(5)]
    assert len({tuple(epoch) for epoch in epochs}) == 5
    for epoch in range(5):
        assert all(order(view, epoch) == epochs[epoch] for view in views)
        assert sorted(epochs[epoch]) == list(range(samples)), "no padding repeats"
        shards = [
            [
                e
                for step in range(view.steps_per_epoch)
                for m in view.share(rank, ranks)
                for e in view.edges(epoch, step, m)
            ]
            for rank, view in enumerate(views)
        ]
        assert sorted(int(e) for shard in shards for e in shard) == list(range(samples))


def test_16_validation_edges_stay_out_unless_asked_for() -> None:
    assert EvaluateSection().use_valid_edges is False


def test_16_added_edges_go_both_ways_once() -> None:
    graph = graph_of(6, [(0, 1), (1, 2)], [2000, 2001, 2002, 2003, 2004, 2005], not_later=True)
    added = np.array([[3, 0], [1, 0], [3, 0], [4, 4], [0, 3]], np.int32)  # new, known, twice, a loop, the reverse
    wider = add_edges(graph, added)
    assert neighbour_sets(graph_of(6, [(0, 1), (1, 2), (0, 3)])) == neighbour_sets(
        graph_of(6, [(v, u) for u in range(6) for v in wider.indices[wider.indptr[u] : wider.indptr[u + 1]]])
    )
    assert wider.indptr.tolist() == [0, 2, 4, 5, 6, 6, 6]
    assert wider.indices.tolist() == [1, 3, 0, 2, 1, 0]
    assert (wider.indptr.dtype, wider.indices.dtype) == (graph.indptr.dtype, graph.indices.dtype)
    assert wider.not_later
    assert wider.year is graph.year
    assert graph.indices.tolist() == [1, 0, 2, 1], "the training graph is left as it was"


def test_16_adding_nothing_changes_nothing() -> None:
    graph = graph_of(5, random_pairs(0, 5, 6))
    wider = add_edges(graph, np.zeros((0, 2), np.int32))
    np.testing.assert_array_equal(wider.indptr, graph.indptr)
    np.testing.assert_array_equal(wider.indices, graph.indices)
