"""Order, shares and purity: what a micro-batch holds depends on its number and on nothing else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.counters import Stream, derive_key
from horovod_trainer.data import batches
from horovod_trainer.data.batches import Buffer, MicroBatch, Recipe, Schedule, prefetch
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Inputs
from horovod_trainer.data.negatives import draw_uniform
from horovod_trainer.data.sampler import sample_blocks
from tests.graphs import World, random_pairs, worlds
from tests.reference import target_pairs

schedules = st.builds(
    Schedule, seed=st.integers(0, 2**63 - 1), num_edges=st.integers(0, 120), batch_size=st.integers(1, 20),
    micro_batches=st.integers(1, 9),
)  # fmt: skip


def assert_same(a: Any, b: Any) -> None:
    """Assert that two values are the same, array by array, bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, list):
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@settings(max_examples=60, deadline=None)
@given(schedule=schedules, size=st.integers(1, 7), epoch=st.integers(0, 50))
def test_every_seed_edge_is_seen_once_per_epoch(schedule: Schedule, size: int, epoch: int) -> None:
    seen: list[int] = []
    for step in range(schedule.steps_per_epoch):
        counts = []
        for rank in range(size):
            for micro in schedule.share(rank, size):
                edges = schedule.edges(epoch, step, micro)
                assert len(edges) <= schedule.batch_size
                seen += edges.tolist()
                counts.append(len(edges))
        assert len(counts) == max(schedule.micro_batches, size)
        assert sum(counts) == schedule.positives(step) > 0
    assert sorted(seen) == list(range(schedule.num_edges))
    full = schedule.batch_size * schedule.micro_batches
    assert [schedule.positives(step) for step in range(schedule.steps_per_epoch - 1)] == [full] * (
        schedule.steps_per_epoch - 1
    )


@settings(max_examples=60, deadline=None)
@given(schedule=schedules, size=st.integers(1, 12))
def test_shares_are_disjoint_and_complete(schedule: Schedule, size: int) -> None:
    shares = [set(schedule.share(rank, size)) for rank in range(size)]
    numbers = max(schedule.micro_batches, size)  # a rank without a micro-batch runs an empty one
    assert sum(len(share) for share in shares) == numbers
    assert set().union(*shares) == set(range(numbers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(len(schedule.edges(0, 0, empty)) == 0 for empty in range(schedule.micro_batches, numbers))


@settings(max_examples=25, deadline=None)
@given(
    world=worlds(), shared=st.booleans(), stored=st.sampled_from([None, "mean", "max"]), seed=st.integers(0, 2**63 - 1)
)
def test_a_micro_batch_is_a_pure_function_of_its_number(world: World, shared: bool, stored: Any, seed: int) -> None:
    def make() -> Recipe:
        return world.recipe(
            batch_size=3, micro_batches=2, fanouts=(2, 2), stored=stored, shared=shared, seed=seed, negatives=3
        )

    recipe = make()
    work = [(epoch, step, m) for epoch in range(2) for step in range(recipe.schedule.steps_per_epoch) for m in range(2)]
    first = {number: recipe.build(*number) for number in work}
    with ThreadPoolExecutor(3) as pool:
        for number, other in zip(reversed(work), pool.map(lambda n: make().build(*n), reversed(work)), strict=True):
            assert_same(first[number], other)
    for number, ahead in zip(work, prefetch(recipe, work, 2), strict=True):
        assert_same(first[number], ahead)


def test_every_number_of_a_micro_batch_matters() -> None:
    """Same seed edges (one batch holds all), yet another epoch, step or micro-batch draws anew."""
    recipe = World(60, random_pairs(1, 60, 200)).recipe(batch_size=40, micro_batches=2, fanouts=(2,), negatives=4)
    numbers = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    batches = [recipe.build(*number) for number in numbers]
    assert len({batch.dropout_key for batch in batches}) == len(numbers)
    assert len({tuple(target_pairs(batch)) for batch in batches}) == len(numbers)
    assert len({batch.negatives.tails.tobytes() for batch in batches}) == len(numbers)
    other = replace(recipe, schedule=replace(recipe.schedule, seed=1)).build(0, 0, 0)
    assert other.dropout_key != batches[0].dropout_key
    assert target_pairs(other) != target_pairs(batches[0])


def test_negatives_sampling_and_dropout_draw_from_streams_of_their_own() -> None:
    recipe = World(30, random_pairs(1, 30, 80)).recipe(batch_size=9, micro_batches=2, fanouts=(2, 2), exclude=False)
    batch = recipe.build(2, 3, 1)
    edges = recipe.schedule.edges(2, 3, 1)
    source, target = recipe.edge_source[edges], recipe.edge_target[edges]
    number = (recipe.schedule.seed, 2, 3, 1)
    negatives = draw_uniform(recipe.candidates, source, target, 2, derive_key(*number, Stream.NEGATIVES))
    assert_same(batch.negatives, negatives)
    seeds = batch.nodes[: batch.blocks[0].num_dst]
    _, blocks = sample_blocks(recipe.graph, seeds, no_exclusion(), (2, 2), derive_key(*number, Stream.SAMPLING))
    assert_same(batch.blocks, blocks)
    assert batch.dropout_key == derive_key(*number, Stream.DROPOUT)


@settings(max_examples=30, deadline=None)
@given(world=worlds(), shared=st.booleans(), batch_size=st.integers(1, 30))
def test_local_ids_say_who_is_who(world: World, shared: bool, batch_size: int) -> None:
    recipe = world.recipe(batch_size=batch_size, micro_batches=2, fanouts=(2,), shared=shared, negatives=3)
    for micro in range(2):
        batch = recipe.build(0, 0, micro)
        edges = recipe.schedule.edges(0, 0, micro)
        assert len(batch.source) == len(edges)
        np.testing.assert_array_equal(batch.nodes[batch.source], recipe.edge_source[edges])
        np.testing.assert_array_equal(batch.nodes[batch.target], recipe.edge_target[edges])
        if len(edges):
            np.testing.assert_array_equal(batch.nodes[batch.tails], batch.negatives.tails)
        else:
            assert (len(batch.nodes), batch.tails.size, batch.excluded_pairs) == (0, 0, 0)


def tiny() -> tuple[Recipe, list[tuple[int, int, int]]]:
    recipe = World(8, random_pairs(3, 8, 12)).recipe(batch_size=2, micro_batches=2)
    return recipe, [(0, step, micro) for step in range(3) for micro in range(2)]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_prefetch_keeps_the_order(ahead: int) -> None:
    recipe, work = tiny()
    seen = 0
    for number, batch in zip(work, prefetch(recipe, work, ahead), strict=True):
        time.sleep(0.002)  # whoever builds ahead must not touch what is being read
        assert_same(batch, recipe.build(*number))
        seen += 1
    assert seen == len(work)


def test_a_buffer_is_used_again_and_grows() -> None:
    buffer = Buffer()
    small = buffer.take(3, 4)
    assert small.shape == (3, 4)
    assert small.flags.c_contiguous
    assert np.shares_memory(small, buffer.take(2, 6))
    assert buffer.take(100, 4).shape == (100, 4)


def test_a_micro_batch_lies_in_the_buffer_it_was_given() -> None:
    recipe, work = tiny()
    buffer = Buffer()
    buffer.take(100, recipe.features.width)  # room for any of them
    first = recipe.build(*work[0], buffer)
    kept = first.dense().copy()
    other = recipe.build(*work[1], buffer)
    assert np.shares_memory(first.dense(), other.dense())
    np.testing.assert_array_equal(recipe.build(*work[0]).dense(), kept)


class Broken(Recipe):
    """Fails at the third micro-batch."""

    def build(self, epoch: int, step: int, micro: int, buffer: Buffer | None = None) -> MicroBatch:
        if (step, micro) == (1, 0):
            raise FloatingPointError("no such batch")
        return super().build(epoch, step, micro, buffer)


@pytest.mark.parametrize("ahead", [0, 1, 50])
def test_prefetch_raises_where_the_batch_would_have_come(ahead: int) -> None:
    recipe, work = tiny()
    broken = Broken(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})
    coming = prefetch(broken, work, ahead)
    assert [next(coming).micro for _ in range(2)] == [0, 1]
    with pytest.raises(FloatingPointError, match="no such batch"):
        next(coming)
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_prefetch_left_early_ends_its_thread() -> None:
    recipe, work = tiny()
    coming = prefetch(recipe, work, 1)
    next(coming)
    coming.close()  # type: ignore[attr-defined]  # a generator, typed as an iterator
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_large_inputs_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows, exclusions at their own nodes included, in whatever parts."""
    world = World(60, random_pairs(1, 60, 300))
    small = world.recipe(batch_size=20, fanouts=(3, 2), stored="mean").build(0, 0, 0)
    monkeypatch.setattr(batches, "LARGE", 0)
    large = world.recipe(batch_size=20, fanouts=(3, 2), stored="mean").build(0, 0, 0)
    assert isinstance(large.inputs, Inputs)
    assert not isinstance(small.inputs, Inputs)
    assert large.excluded_pairs > 0
    np.testing.assert_array_equal(large.dense(), small.inputs)
    parts = [large.inputs.part(first, min(first + 7, len(large.nodes))) for first in range(0, len(large.nodes), 7)]
    np.testing.assert_array_equal(np.concatenate(parts), small.inputs)
