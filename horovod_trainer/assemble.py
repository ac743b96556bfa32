"""From a config and an open store to the things a run is made of: graph, recipe, model, evaluator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.comm.base import Communicator
from horovod_trainer.config import Config
from horovod_trainer.data import csr
from horovod_trainer.data.batches import Recipe, Schedule
from horovod_trainer.data.gather import Features
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.prepare import changed_settings
from horovod_trainer.data.sampler import Graph
from horovod_trainer.data.store import HeldOut, SplitName, Store
from horovod_trainer.errors import Conflict, InvalidInput, Problem
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
    """Raise Conflict where the store was prepared with other settings, InvalidInput with all that it lacks."""
    changed = changed_settings(store.manifest, config.data)
    if changed:
        stored, wanted = store.manifest["config"], config.data.model_dump(mode="json")
        sentence = f"the store at {store.path} was prepared with {{}}; prepare it again, or name it in data.store"
        raise Conflict([Problem(f"data.{key}", sentence.format(stored.get(key)), wanted[key]) for key in changed])
    problems = []
    if config.sampling.neighbours == "not_later" and store.year is None:
        problems.append(Problem("sampling.neighbours", "not_later needs years, and the store has none", "not_later"))
    if config.model.input == "features" and store.features.shape[1] == 0:
        problems.append(Problem("model.input", "the store has no features; use constant", "features"))
    for split in ("valid", "test"):
        problems += _hits_problems(config, split, store.held_out(split))
    if problems:
        raise InvalidInput(problems)


def _hits_problems(config: Config, split: str, held_out: HeldOut) -> list[Problem]:
    """Return what is wrong with evaluate.hits_pooled, which goes with a shared pool and with nothing else."""
    wanted, pool = config.evaluate.hits_pooled, held_out.pool
    if pool is None:
        message = f"the {split} split has negatives per query and no shared pool; leave it empty"
        return [Problem("evaluate.hits_pooled", message, list(wanted))] if wanted else []
    if not wanted:
        return [Problem("evaluate.hits_pooled", f"the {split} split has one shared pool: name a k", list(wanted))]
    message = f"the {split} split has only {len(pool)} shared negatives"
    return [Problem("evaluate.hits_pooled", message, k) for k in wanted if k > len(pool)]


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


def build_evaluator(config: Config, store: Store, comm: Communicator, threads: int, split: SplitName) -> Evaluator:
    """Return the evaluator of a split; test sees the validation edges in the graph only when told to."""
    graph = message_graph(config, store)
    stored = first_hop(config, store).stored
    if split == "test" and config.evaluate.use_valid_edges:
        graph = add_edges(graph, store.held_out("valid").edge)
        stored = stored and config.model.input == "constant"  # the store's sums know nothing of the added edges
    citations = (store.train_indptr, store.train_target) if store.directed else None
    return Evaluator(graph, inputs(config, store, graph), comm, config.evaluate, stored, threads, citations)


def add_edges(graph: Graph, edge: NDArray[np.int32]) -> Graph:
    """Return the graph with the edges [E, 2] added in both directions, rows ascending and without repeats."""
    added, _, _ = csr.distinct(csr.from_pairs(edge.T, graph.num_nodes))
    wider = csr.union(csr.Csr(graph.indptr, graph.indices), csr.symmetric(added))
    return replace(graph, indptr=wider.indptr, indices=wider.indices)
