"""Who is held out: splits by time and by unordered pair, with fixed negatives; a pure function of graph and seed."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.counters import below64, derive_key, draw_below, fold64, permutation
from horovod_trainer.data import csr
from horovod_trainer.data.exclusion import find
from horovod_trainer.data.graph import RawGraph, Split
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.store import HeldOut
from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.jit import compiled

REFERENCES = 3  # a held-out source cites at least so many papers, as in ogbl-citation2: two go, one stays
MOST_NEGATIVES = 2**32  # stored per split: 16 GiB


class Draw(IntEnum):
    """What a key of the split seed is used for; apart from the training streams of counters.Stream."""

    SOURCES = 101
    REFERENCES = 102
    PAIRS = 103
    DIRECTIONS = 104
    VALID = 105
    TEST = 106


def make_split(graph: RawGraph, config: DataSection) -> tuple[Split, list[str]]:
    """Return the split of a cleaned graph that config asks for, and warnings.

    auto takes the split that came with the data, else splits by time if there are years and directions, else at
    random. Undirected training pairs get a random direction each. Raises InvalidInput where that cannot be done.
    """
    kind = config.split
    if kind == "auto":
        kind = "given" if graph.split else "time" if graph.directed and graph.year is not None else "random"
    if kind == "given":
        if graph.split is None:
            raise InvalidInput(Problem("data.split", f"{graph.name} comes without a split of its own", "given"))
        return _directions(graph, graph.split, config.split_seed), []
    held_out, train = (_by_time if kind == "time" else _by_pair)(graph, config)
    warnings = []
    asked = round((config.valid_fraction + config.test_fraction) * graph.edges.shape[1])
    if sum(map(len, held_out)) < 0.9 * asked:
        warnings.append(f"held out {sum(map(len, held_out))} edges, fewer than the {asked} asked for: too few sources")
    candidates = true_citations(graph)
    valid, test = (
        HeldOut(edge, draw_negatives(candidates, edge[:, 0], config.negatives, derive_key(config.split_seed, stream)))
        for edge, stream in zip(held_out, (Draw.VALID, Draw.TEST), strict=True)
    )
    return _directions(graph, Split(train, valid, test), config.split_seed), warnings


def true_citations(graph: RawGraph) -> Candidates:
    """Return what a source of this cleaned graph may be ranked against, and all it truly cites (or links to)."""
    truth = csr.from_pairs(graph.edges, graph.num_nodes)
    return Candidates.build(*(truth if graph.directed else csr.symmetric(truth)), graph.year)


def draw_negatives(candidates: Candidates, source: NDArray[Any], count: int, key: int) -> NDArray[np.int32]:
    """Return int32 [Q, count] tails, row i uniform over papers not later than source[i], never itself or cited by it.

    Raises InvalidInput when a source has fewer such papers than `count`.
    """
    if len(source) * count > MOST_NEGATIVES:
        message = f"{len(source)} held-out edges with {count} negatives each: lower the fractions or data.negatives"
        raise InvalidInput(Problem("data.negatives", message, count))
    limits = candidates.limits(source)
    left = _admissible(candidates, source, limits)
    if left.min(initial=count) < count:
        message = (
            f"{np.count_nonzero(left < count)} held-out edges have fewer candidates than that; "
            f"source {source[left.argmin()]} has {left.min()}: lower data.negatives"
        )
        raise InvalidInput(Problem("data.negatives", message, count))
    out = np.empty((len(source), count), np.int32)
    _draw_clean(
        candidates.citations_indptr, candidates.citations, source, limits, candidates.by_year, np.uint64(key), out
    )
    return out


def _admissible(candidates: Candidates, source: NDArray[Any], limits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many tails each source may be ranked against: int64 [Q]."""
    indptr, year = candidates.citations_indptr, candidates.year
    degree = np.diff(indptr)[source]
    if year is not None:  # citations of later papers were never candidates
        citing = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        later = year[candidates.citations] > year[citing]
        degree = degree - np.bincount(citing[later], minlength=len(indptr) - 1)[source]
    return np.asarray(limits - degree - 1)


@compiled
def _draw_clean(indptr: Any, citations: Any, source: Any, limits: Any, by_year: Any, key: Any, out: Any) -> None:
    for i in range(source.shape[0]):
        row_key = fold64(key, i)
        start, stop = indptr[source[i]], indptr[source[i] + 1]
        counter = 0
        for j in range(out.shape[1]):
            while True:
                tail = below64(row_key, counter, limits[i])
                counter += 1
                if by_year.shape[0] > 0:
                    tail = np.int64(by_year[tail])
                if tail != source[i] and find(citations, start, stop, tail) < 0:
                    break
            out[i, j] = tail


def _by_time(graph: RawGraph, config: DataSection) -> tuple[tuple[NDArray[np.int32], ...], NDArray[np.int32]]:
    """Return (valid, test) edges, one of each per chosen source, and the training edges: the latest papers first."""
    year, n = graph.year, graph.num_nodes
    if year is None or not graph.directed:
        raise InvalidInput(Problem("data.split", f"{graph.name} has no {'years' if graph.directed else 'directions'}"))
    source, target = graph.edges
    one_way = (
        csr.from_pairs(graph.edges, n).positions(target, source) < 0
    )  # the reverse of a held-out edge must not stay behind
    eligible = np.flatnonzero(one_way & (year[target] <= year[source]))
    options = np.bincount(source[eligible], minlength=n)
    sources = np.flatnonzero((np.bincount(source, minlength=n) >= REFERENCES) & (options >= 2))
    if len(sources) == 0:
        raise InvalidInput(
            Problem("data.split", f"no paper of {graph.name} has {REFERENCES} references to split", "time")
        )
    wanted = max(1, round((config.valid_fraction + config.test_fraction) * len(source) / 2))
    shuffled = sources[permutation(derive_key(config.split_seed, Draw.SOURCES), len(sources), 0, len(sources))]
    chosen = np.sort(shuffled[np.argsort(-year[shuffled], kind="stable")][:wanted])
    first = csr.pointers(source[eligible], n)[chosen]
    count = options[chosen]
    draws = draw_below(derive_key(config.split_seed, Draw.REFERENCES), np.concatenate([count, count - 1]), 1)[:, 0]
    one, other = draws[: len(chosen)], draws[len(chosen) :]
    other = other + (other >= one)  # distinct, and uniform over the remaining references
    held = [eligible[first + one], eligible[first + other]]
    train = np.delete(graph.edges, np.concatenate(held), axis=1)
    return tuple(graph.edges[:, rows].T.astype(np.int32) for rows in held), train


def _by_pair(graph: RawGraph, config: DataSection) -> tuple[tuple[NDArray[np.int32], ...], NDArray[np.int32]]:
    """Return (valid, test) edges and the training edges; an edge and its reverse always go together."""
    source, target = graph.edges
    pairs = csr.unordered(csr.from_pairs(graph.edges, graph.num_nodes))
    count = len(pairs.indices)
    sizes = [max(1, round(fraction * count)) for fraction in (config.valid_fraction, config.test_fraction)]
    if sum(sizes) >= count:
        raise InvalidInput(Problem("data.split", f"{graph.name} has too few edges to split", count))
    drawn = permutation(derive_key(config.split_seed, Draw.PAIRS), count, 0, sum(sizes))
    part = np.zeros(count, np.int8)
    part[drawn[: sizes[0]]] = 1
    part[drawn[sizes[0] :]] = 2
    of_edge = part[pairs.positions(np.minimum(source, target), np.maximum(source, target))]
    directed = graph if graph.directed else replace(graph, edges=_turn(graph.edges, config.split_seed))
    held = tuple(directed.edges[:, of_edge == number].T.astype(np.int32) for number in (1, 2))
    return held, graph.edges[:, of_edge == 0]


def _directions(graph: RawGraph, split: Split, seed: int) -> Split:
    """Return the split with a source and a target for each undirected training pair."""
    return split if graph.directed else replace(split, train=_turn(split.train, seed))


def _turn(pairs: NDArray[Any], seed: int) -> NDArray[Any]:
    """Return pairs [2, E] with about half of them reversed, so that no node is a source for its low id alone."""
    flip = draw_below(derive_key(seed, Draw.DIRECTIONS), np.full(pairs.shape[1], 2, np.int64), 1)[:, 0] == 1
    return np.where(flip, pairs[::-1], pairs)
