"""Full-graph embeddings: equal to the slow reference, and the same bits for any ranks, hosts and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.aggregate import Hop
from horovod_trainer.comm.base import Communicator, Solo, ThreadWorld
from horovod_trainer.config import ModelSection
from horovod_trainer.data.gather import Aggregator, Features
from horovod_trainer.data.sampler import Graph
from horovod_trainer.inference import LayerFile, embed
from horovod_trainer.model import Dropout, Encoder, LinkPredictor
from tests.graphs import AGGREGATORS, World, features_of, random_pairs, worlds
from tests.reference import neighbour_sets, sage, target_pairs

aggregators = st.sampled_from(AGGREGATORS)


def encoder_of(width: int, seed: int = 0, **settings: Any) -> Encoder:
    return LinkPredictor(ModelSection(**{"hidden": 6, "out": 5, **settings}), width, seed).encoder


def alone(encoder: Encoder, graph: Graph, features: Features, **options: Any) -> np.ndarray:
    options = {"stored_first_hop": False, "node_block": 4, "threads": 1, **options}
    return np.array(embed(encoder, graph, features, Solo(), **options))


@settings(max_examples=30, deadline=None)
@given(
    world=worlds(), layers=st.integers(1, 3), aggregator=aggregators, normalise=st.booleans(), stored=st.booleans(),
    not_later=st.booleans(), block=st.integers(1, 12), seed=st.integers(0, 1000),
)  # fmt: skip
def test_embeddings_equal_the_slow_reference(
    world: World,
    layers: int,
    aggregator: Aggregator,
    normalise: bool,
    stored: bool,
    not_later: bool,
    block: int,
    seed: int,
) -> None:
    graph = world.graph(not_later)
    values = np.random.default_rng(seed).normal(size=(world.num_nodes, 3)).astype(np.float32)
    encoder = encoder_of(3, seed, layers=layers, aggregator=aggregator, normalise=normalise, dropout=0.5)
    stored = stored and not (not_later and world.year)  # the stored sums know no time
    got = alone(encoder, graph, features_of(graph, values), stored_first_hop=stored, node_block=block)
    np.testing.assert_allclose(got, sage(encoder, neighbour_sets(graph), values), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    world=worlds(), layers=st.integers(1, 3), aggregator=aggregators, stored=st.booleans(), exclude=st.booleans(),
    shared=st.booleans(), batch_size=st.integers(1, 8), seed=st.integers(0, 1000),
)  # fmt: skip
def test_training_with_all_neighbours_is_full_graph_on_the_rebuilt_graph(
    world: World,
    layers: int,
    aggregator: Aggregator,
    stored: bool,
    exclude: bool,
    shared: bool,
    batch_size: int,
    seed: int,
) -> None:
    """Sampling, exclusion, the first-hop constant and the kernels, all at once, against the definition."""
    recipe = world.recipe(
        batch_size=batch_size, fanouts=(-1,) * layers, stored=aggregator if stored else None, exclude=exclude,
        shared=shared, seed=seed,
    )  # fmt: skip
    encoder = encoder_of(3, seed, layers=layers, aggregator=aggregator)
    for step in range(recipe.schedule.steps_per_epoch):
        batch = recipe.build(0, step, 0)
        hops = [Hop.of(block, aggregator) for block in batch.blocks]
        with torch.no_grad():
            got = encoder(
                torch.from_numpy(batch.dense()), batch.stored_first_hop, hops, Dropout(0, active=True)
            ).numpy()
        rows = neighbour_sets(recipe.graph, target_pairs(batch) if exclude else ())
        want = sage(encoder, rows, recipe.features.values)
        seeds = batch.nodes[: len(got)]
        assert set(recipe.edge_source[recipe.schedule.edges(0, step, 0)]) <= set(seeds.tolist())
        np.testing.assert_allclose(got, want[seeds], rtol=1e-4, atol=1e-5)


def big(aggregator: Aggregator, layers: int = 3) -> tuple[Encoder, Graph, Features]:
    """Return an encoder and a graph of 500 nodes, 20 of them isolated, that do not divide into blocks evenly."""
    graph = World(500, random_pairs(6, 480, 2000)).graph()
    values = np.random.default_rng(4).normal(size=(500, 19)).astype(np.float32)
    return encoder_of(19, layers=layers, aggregator=aggregator, hidden=64, out=33), graph, features_of(graph, values)


WORLDS = {
    "two ranks": ["a", "a"],
    "four ranks": ["a"] * 4,
    "two hosts of one": ["a", "b"],
    "two hosts of two": ["a", "a", "b", "b"],
    "hosts interleaved": ["a", "b", "a", "b"],
    "uneven hosts": ["b", "a", "a"],
    "five hosts, one idle": ["a", "b", "c", "d", "e"],
}


@pytest.mark.parametrize("hosts", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("block", [37, 128])
def test_ranks_and_hosts_do_not_change_a_bit(hosts: list[str], block: int, tmp_path: Path) -> None:
    encoder, graph, features = big("mean")
    want = alone(encoder, graph, features, stored_first_hop=True, node_block=block)

    def rank(comm: Communicator) -> np.ndarray:
        return np.array(
            embed(encoder, graph, features, comm, stored_first_hop=True, node_block=block, threads=1, scratch=tmp_path)
        )

    for got in ThreadWorld(len(hosts), hosts).run(rank):
        np.testing.assert_array_equal(got, want)
    assert not list(tmp_path.iterdir()), "scratch files have no name any more"


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_threads_do_not_change_a_bit_and_come_back(aggregator: Aggregator) -> None:
    encoder, graph, features = big(aggregator)
    before = torch.get_num_threads()
    want = alone(encoder, graph, features, node_block=50)
    for threads in (2, 5):
        np.testing.assert_array_equal(alone(encoder, graph, features, node_block=50, threads=threads), want)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("half", [False, True])
def test_stored_first_hop_equals_on_the_fly(aggregator: Aggregator, half: bool) -> None:
    encoder, graph, features = big(aggregator, layers=2)
    if half:
        values = features.values.astype(np.float16)
        exact = features_of(graph, values.astype(np.float32))
        features = Features(values, exact.neighbour_sum, exact.neighbour_max)
    stored = alone(encoder, graph, features, stored_first_hop=True, node_block=64)
    np.testing.assert_allclose(alone(encoder, graph, features, node_block=64), stored, rtol=1e-5, atol=1e-5)


def test_memory_mapped_read_only_arrays_are_read_as_they_are(tmp_path: Path) -> None:
    encoder, graph, features = big("sum", layers=2)
    want = alone(encoder, graph, features, stored_first_hop=True)

    def mapped(name: str, array: Any) -> Any:
        np.save(tmp_path / f"{name}.npy", array)
        return np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    store = Graph(mapped("indptr", graph.indptr), mapped("indices", graph.indices))
    inputs = Features(mapped("features", features.values), mapped("sum", features.neighbour_sum))
    np.testing.assert_array_equal(alone(encoder, store, inputs, stored_first_hop=True), want)


def test_progress_counts_blocks_to_the_end() -> None:
    encoder, graph, features = big("mean", layers=2)
    said: list[tuple[int, int]] = []
    alone(encoder, graph, features, node_block=100, progress=lambda _, done, total: said.append((done, total)))
    assert said == [(done, 10) for done in range(1, 11)]


def test_one_layer_is_mapped_and_the_one_being_computed_is_not(tmp_path: Path) -> None:
    encoder, graph, features = big("mean", layers=3)
    seen: list[int] = []

    def look(stage: str, done: int, total: int) -> None:
        seen.append(Path("/proc/self/maps").read_text().count(str(tmp_path / "horovod-trainer-")))

    embed(
        encoder, graph, features, Solo(), stored_first_hop=True, node_block=250, threads=1, scratch=tmp_path,
        progress=look,
    )  # fmt: skip
    assert seen == [0, 0, 1, 1, 1, 1]  # two blocks of each layer


@pytest.mark.parametrize("aggregator", ["sum", "mean"])
def test_a_hub_of_many_neighbours_is_added_up_exactly(aggregator: Aggregator) -> None:
    leaves = 200_000
    indptr = np.full(leaves + 2, 2 * leaves)
    indptr[:2] = 0, leaves
    indptr[1:] = leaves + np.arange(leaves + 1)  # every leaf has the hub
    graph = Graph(
        indptr.astype(np.int64), np.concatenate([np.arange(1, leaves + 1), np.zeros(leaves)]).astype(np.int32)
    )
    encoder = encoder_of(1, layers=2, aggregator=aggregator, hidden=1, out=1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.fill_(float(name.endswith("neighbour.weight")))
    values = np.full((leaves + 1, 1), 0.1, np.float32)
    hub = alone(encoder, graph, Features(values), node_block=leaves + 1)[0, 0]
    expected = float(values[0, 0]) * (leaves if aggregator == "sum" else 1)
    np.testing.assert_allclose(hub, expected, rtol=1e-6)  # float32 alone would be off by more than 1e-3


def test_no_rank_computes_what_another_does(tmp_path: Path) -> None:
    def blocks(comm: Communicator) -> list[tuple[int, int]]:
        return LayerFile(comm, (103, 2), 10, tmp_path).mine()

    for size in (1, 3, 12):
        shares = ThreadWorld(size).run(blocks)
        mine = sorted(block for share in shares for block in share)
        assert mine == [(first, min(first + 10, 103)) for first in range(0, 103, 10)]
