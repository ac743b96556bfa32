"""A graph as a source gives it, and its cleaning: what is refused, what is dropped and counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data import csr
from horovod_trainer.data.store import HeldOut
from horovod_trainer.errors import InvalidInput, Problem

MOST_NODES = 2**31 - 2  # ids are stored as int32
LAST_YEAR = 3000
_ROWS = 1 << 13


@dataclass(frozen=True)
class Split:
    """Training edges [2, E] (row 0 cites row 1; ids as in RawGraph) and the held-out ones."""

    train: NDArray[Any]
    valid: HeldOut
    test: HeldOut


@dataclass(frozen=True)
class RawGraph:
    """What a source gives. edges [2, E]: true edges, held-out ones included; row 0 cites row 1; a split's own training
    edges may be left out, `cleaned` adds them.

    Ids are int32, or int64 where some do not fit, which `cleaned` refuses. Undirected graphs may give an edge in one
    direction or both. features float [N, F] or None; year [N] or None; split: the one that came with the data.
    digests: file name -> SHA-256 of the raw files. warnings: for the user.
    """

    name: str
    kind: str
    origin: str
    licence: str
    num_nodes: int
    edges: NDArray[Any]
    directed: bool
    features: NDArray[Any] | None = None
    year: NDArray[Any] | None = None
    split: Split | None = None
    digests: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def cleaned(raw: RawGraph) -> tuple[RawGraph, dict[str, int]]:
    """Return the graph without self-loops and duplicates, and how many were dropped; ids and year become int32.

    Edges come back sorted by (source, target). An undirected edge given both ways or twice is one pair (low, high).
    Raises InvalidInput with every flaw that no clean-up can mend: ids, features or years out of range, wrong shapes,
    no edges.
    """
    problems = _flaws(raw)
    if problems:
        raise InvalidInput(problems)
    edges, counts = _distinct(raw.edges, raw.num_nodes, raw.directed)
    if len(edges.indices) == 0:
        raise InvalidInput(Problem(f"{raw.name}: edges", "the graph is empty: no edge is left after clean-up", counts))
    split = raw.split
    if split is not None:
        train, dropped = _distinct(split.train, raw.num_nodes, raw.directed)
        if len(train.indices) == 0:
            raise InvalidInput(Problem(f"{raw.name}: train", "no training edge is left after clean-up", dropped))
        edges = csr.union(edges, train)
        split = replace(split, train=train.pairs())
        counts = dropped  # what was dropped from what is stored
    year = raw.year.astype(np.int32) if raw.year is not None else None
    return replace(raw, edges=edges.pairs(), year=year, split=split), counts


def _distinct(edges: NDArray[Any], num_nodes: int, directed: bool) -> tuple[csr.Csr, dict[str, int]]:
    graph, loops, repeats = csr.distinct(csr.from_pairs(edges, num_nodes))
    counts = {"self_loops": loops, "duplicates": repeats}
    if not directed:
        once = csr.unordered(graph)
        counts["merged_directions"] = len(graph.indices) - len(once.indices)
        graph = once
    return graph, counts


def as_ids(name: str, array: Any) -> NDArray[Any]:
    """Return ids as int32, or as int64 where some do not fit; raises InvalidInput unless integers."""
    try:
        ids = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as failure:  # lists of different lengths, a sparse or learnt tensor
        _refuse(name, f"ids are an array of integers: {failure}", type(array).__name__)
    if ids.dtype.kind not in "iu":
        _refuse(name, "ids are integers", str(ids.dtype))
    fits = ids.min(initial=0) >= -(2**31) and ids.max(initial=0) < 2**31
    return ids.astype(np.int32 if fits else np.int64, copy=False)


def as_floats(name: str, array: Any) -> NDArray[np.float32]:
    """Return numbers as float32; too large ones become infinite, which `cleaned` refuses. Raises InvalidInput."""
    values = np.asarray(array)
    if values.dtype.kind not in "biuf":
        _refuse(name, "features are numbers", str(values.dtype))
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _refuse(path: str, message: str, got: object = None) -> NoReturn:
    raise InvalidInput(Problem(path, message, got))


def _flaws(raw: RawGraph) -> list[Problem]:
    """Return everything that makes the graph unusable."""
    n = raw.num_nodes
    found: list[Problem] = []

    def add(part: str, message: str, got: object = None) -> None:
        found.append(Problem(f"{raw.name}: {part}", message, got))

    if not 1 <= n <= MOST_NODES:
        add("num_nodes", f"must be between 1 and {MOST_NODES}: ids are stored as int32", n)
    if raw.edges.ndim != 2 or raw.edges.shape[0] != 2:
        add("edges", "must be [2, E]", raw.edges.shape)
        return found
    if raw.edges.shape[1] == 0:
        add("edges", "the graph is empty: it has no edge")
    parts = [("edges", raw.edges)]
    if raw.split is not None and (raw.split.train.ndim != 2 or raw.split.train.shape[0] != 2):
        add("train edges", "must be [2, E]", raw.split.train.shape)
        return found
    if raw.split is not None:
        parts.append(("train edges", raw.split.train))
        for name, held_out in (("valid", raw.split.valid), ("test", raw.split.test)):
            parts += _parts(name, held_out)
            _held_out_flaws(name, held_out, add)
    for part, ids in parts:
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= n:
            unknown = int(np.count_nonzero((ids < 0) | (ids >= n)))
            add(part, f"{unknown} unknown ids: outside [0, {n})", [int(ids.min()), int(ids.max())])
    _feature_flaws(raw, add)
    _year_flaws(raw, add)
    return found


def _parts(name: str, held_out: HeldOut) -> list[tuple[str, NDArray[Any]]]:
    parts = [(f"{name} edges", held_out.edge)]
    parts += [(f"{name} negatives", held_out.negatives)] if held_out.negatives is not None else []
    parts += [(f"{name} pool", held_out.pool)] if held_out.pool is not None else []
    return [(part, array) for part, array in parts if array.size]


def _held_out_flaws(name: str, held_out: HeldOut, add: Any) -> None:
    edge, negatives, pool = held_out.edge, held_out.negatives, held_out.pool
    if edge.ndim != 2 or edge.shape[1:] != (2,) or len(edge) == 0:
        add(f"{name} edges", "must be [Q, 2] with at least one edge", edge.shape)
        return
    if negatives is not None and (negatives.ndim != 2 or len(negatives) != len(edge) or negatives.shape[1] == 0):
        add(f"{name} negatives", f"must be [{len(edge)}, K]: a row for every edge", negatives.shape)
    if pool is not None and (pool.ndim != 2 or pool.shape[1:] != (2,) or len(pool) == 0):
        add(f"{name} pool", "must be [P, 2] with at least one pair", pool.shape)
    if (negatives is None) == (pool is None):
        add(f"{name} negatives", "need a row per edge, or one shared pool; not both")
    loops = int(np.count_nonzero(edge[:, 0] == edge[:, 1]))
    if loops:
        add(f"{name} edges", "are self-loops", loops)


def _feature_flaws(raw: RawGraph, add: Any) -> None:
    if raw.features is None:
        return
    if raw.features.ndim != 2 or len(raw.features) != raw.num_nodes:
        add("features", f"must be [{raw.num_nodes}, F]: a row for every node", raw.features.shape)
        return
    bad: list[int] = []
    for first in range(0, len(raw.features), _ROWS):
        finite = np.isfinite(raw.features[first : first + _ROWS])
        if not finite.all():  # by rows it takes five times as long
            bad += (first + np.flatnonzero(~finite.all(1))).tolist()
    if bad:
        add("features", f"NaN, infinite or too large in {len(bad)} rows, the first of node {bad[0]}")


def _year_flaws(raw: RawGraph, add: Any) -> None:
    if raw.year is None:
        return
    if raw.year.shape != (raw.num_nodes,) or raw.year.dtype.kind not in "iuf":
        got = f"{raw.year.dtype} {list(raw.year.shape)}"
        add("year", f"must be [{raw.num_nodes}] numbers: one for every node", got)
        return
    possible = (raw.year >= 0) & (raw.year <= LAST_YEAR) & (raw.year == np.floor(raw.year))  # NaN compares false
    if not possible.all():
        worst = raw.year[~possible]
        add(
            "year",
            f"{len(worst)} impossible years: missing, or not a whole number in [0, {LAST_YEAR}]",
            worst[0].item(),
        )
