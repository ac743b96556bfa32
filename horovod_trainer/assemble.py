"""From a config and an open store to the things a run is made of: graph, recipe, model, evaluator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.comm.base import Communicator
from horovod_trainer.config import Config
from horovod_trainer.data.batches import Recipe, Schedule
from horovod_trainer.data.gather import Features
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.sampler import Graph
from horovod_trainer.data.store import Store
from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.evaluate import Evaluator
from horovod_trainer.model import LinkPredictor


@dataclass(frozen=True)
class FirstHop:
    """Which path layer 1's neighbourhood takes, and the sentence that says why."""

    stored: bool
    reason: str


def first_hop(config: Config, store: Store) -> FirstHop:
    """Return whether layer 1 may use the stored neighbour aggregate: only when it reads the stored inputs untouched."""
    model, sampling = config.model, config.sampling
    if sampling.first_hop == "sampled":
        return FirstHop(False, "sampled, as sampling.first_hop asks")
    if model.input_dropout > 0:
        return FirstHop(False, "sampled: model.input_dropout changes the inputs in every micro-batch")
    if sampling.neighbours == "not_later":
        return FirstHop(False, "sampled: sampling.neighbours = not_later filters neighbourhoods by year")
    if model.aggregator == "max" and model.input == "features" and store.neighbour_max is None:
        return FirstHop(False, "sampled: the store has no neighbour maximum (data.neighbour_max)")
    return FirstHop(True, "exact, over all neighbours, from the stored neighbour aggregate")


def check_store(config: Config, store: Store) -> None:
    """Raise InvalidInput with everything this config asks of a graph that the store does not have."""
    problems = []
    if config.sampling.neighbours == "not_later" and store.year is None:
        problems.append(Problem("sampling.neighbours", "not_later needs years, and the store has none", "not_later"))
    if config.model.input == "features" and store.features.shape[1] == 0:
        problems.append(Problem("model.input", "the store has no features; use constant", "features"))
    for split in ("valid", "test"):
        pool = store.held_out(split).pool
        largest = max(config.evaluate.hits_pooled, default=0)
        if pool is not None and len(pool) < largest:
            message = f"needs at least {largest} shared negatives, the {split} split has {len(pool)}"
            problems.append(Problem("evaluate.hits_pooled", message, largest))
        if pool is not None and not config.evaluate.hits_pooled:
            problems.append(Problem("evaluate.hits_pooled", f"the {split} split has one shared pool: name a k", ()))
            break
    if problems:
        raise InvalidInput(problems)


def message_graph(config: Config, store: Store) -> Graph:
    """Return the training message-passing graph."""
    not_later = config.sampling.neighbours == "not_later"
    return Graph(store.indptr, store.indices, store.year if not_later else None, not_later)


def inputs(config: Config, store: Store, graph: Graph) -> Features:
    """Return what layer 1 reads."""
    if config.model.input == "constant":
        return Features.constant(graph)
    return Features(store.features, store.neighbour_sum, store.neighbour_max)


def build_recipe(config: Config, store: Store, world_size: int) -> Recipe:
    """Return what micro-batches are made from; train.micro_batches = null makes one per rank."""
    graph = message_graph(config, store)
    schedule = Schedule(
        config.train.seed, len(store.train_source), config.train.batch_size, config.train.micro_batches or world_size
    )
    # what a source must not be given as a negative: its own training citations, or any neighbour without directions
    citing = (store.train_indptr, store.train_target) if store.directed else (store.indptr, store.indices)
    stored = first_hop(config, store).stored
    return Recipe(
        schedule, graph, store.train_source, store.train_target, Candidates.build(*citing, store.year),
        inputs(config, store, graph), config.sampling.fanouts, config.negatives.count,
        config.negatives.kind == "shared", config.sampling.exclude_targets,
        config.model.aggregator if stored else None,
    )  # fmt: skip


def build_model(config: Config, width: int) -> LinkPredictor:
    """Return the model, initialised from train.seed."""
    return LinkPredictor(config.model, width, config.train.seed)


def build_evaluators(config: Config, store: Store, comm: Communicator, threads: int) -> dict[str, Evaluator]:
    """Return the evaluator of each split; test adds the validation edges to the graph only when told to."""
    graph = message_graph(config, store)
    stored = first_hop(config, store).stored
    citations = (store.train_indptr, store.train_target) if store.directed else None
    plain = Evaluator(graph, inputs(config, store, graph), comm, config.evaluate, stored, threads, citations)
    if not config.evaluate.use_valid_edges:
        return {"valid": plain, "test": plain}
    wider = add_edges(graph, store.held_out("valid").edge)
    features = inputs(config, store, wider)
    exact = stored and config.model.input == "constant"  # the store's sums know nothing of the added edges
    on_the_fly = replace(plain, graph=wider, features=features, stored_first_hop=exact)
    return {"valid": plain, "test": on_the_fly}


def add_edges(graph: Graph, edge: NDArray[np.int32]) -> Graph:
    """Return the graph with the edges [E, 2] added in both directions, rows ascending and without repeats."""
    nodes = np.int64(graph.num_nodes)
    rows = np.repeat(np.arange(nodes), np.diff(graph.indptr))
    a, b = edge[:, 0].astype(np.int64), edge[:, 1].astype(np.int64)
    keys = np.unique(np.concatenate([rows * nodes + graph.indices, a * nodes + b, b * nodes + a]))
    keys = keys[keys // nodes != keys % nodes]
    indptr = np.zeros(graph.num_nodes + 1, np.int64)
    np.cumsum(np.bincount(keys // nodes, minlength=graph.num_nodes), out=indptr[1:])
    return replace(graph, indptr=indptr, indices=(keys % nodes).astype(np.int32))
