"""A graph as a source gives it, and its cleaning: what is refused, what is dropped and counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.store import HeldOut
from horovod_trainer.errors import InvalidInput, Problem

MOST_NODES = 2**31 - 2  # ids are stored as int32
LAST_YEAR = 3000
_ROWS = 1 << 16


@dataclass(frozen=True)
class Split:
    """Training edges int64 [2, E] (row 0 cites row 1) and the held-out ones."""

    train: NDArray[np.int64]
    valid: HeldOut
    test: HeldOut


@dataclass(frozen=True)
class RawGraph:
    """What a source gives. edges int64 [2, E]: all true edges, held-out ones included; row 0 cites row 1.

    Undirected graphs may give an edge in one direction or both. features float [N, F] or None; year [N] or None;
    split: the one that came with the data. digests: file name -> SHA-256 of the raw files. warnings: for the user.
    """

    name: str
    kind: str
    origin: str
    licence: str
    num_nodes: int
    edges: NDArray[np.int64]
    directed: bool
    features: NDArray[Any] | None = None
    year: NDArray[Any] | None = None
    split: Split | None = None
    digests: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def cleaned(raw: RawGraph) -> tuple[RawGraph, dict[str, int]]:
    """Return the graph without self-loops and duplicates, and how many were dropped; year becomes int32.

    Edges come back sorted by (source, target). An undirected edge given both ways or twice is one pair (low, high).
    Raises InvalidInput with every flaw that no clean-up can mend: ids, features or years out of range, wrong shapes,
    no edges.
    """
    problems = _flaws(raw)
    if problems:
        raise InvalidInput(problems)
    edges, counts = unique_edges(raw.edges, raw.num_nodes, raw.directed)
    if edges.shape[1] == 0:
        raise InvalidInput(Problem(f"{raw.name}: edges", "the graph is empty: no edge is left after clean-up", counts))
    split = raw.split
    if split is not None:
        train, dropped = unique_edges(split.train, raw.num_nodes, raw.directed)
        if train.shape[1] == 0:
            raise InvalidInput(Problem(f"{raw.name}: train", "no training edge is left after clean-up", dropped))
        split = replace(split, train=train)
        counts = dropped  # what was dropped from what is stored
    year = raw.year.astype(np.int32) if raw.year is not None else None
    return replace(raw, edges=edges, year=year, split=split), counts


def unique_edges(edges: NDArray[np.int64], num_nodes: int, directed: bool) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Return int64 [2, E'] sorted, without self-loops and duplicates, and the counts of what was dropped."""
    kept = edges[:, edges[0] != edges[1]]
    counts = {"self_loops": edges.shape[1] - kept.shape[1]}
    keys = sorted_unique(kept[0] * num_nodes + kept[1])
    counts["duplicates"] = kept.shape[1] - len(keys)
    if not directed:
        source, target = np.divmod(keys, num_nodes)
        once = sorted_unique(np.minimum(source, target) * num_nodes + np.maximum(source, target))
        counts["merged_directions"] = len(keys) - len(once)
        keys = once
    return np.stack(np.divmod(keys, num_nodes)), counts


def sorted_unique(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct keys in ascending order; sorts `keys` in place (np.unique would copy)."""
    keys.sort()
    first = np.concatenate([np.ones(min(1, len(keys)), bool), keys[1:] != keys[:-1]])
    return np.asarray(keys[first])


def symmetric(edges: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Return int64 [2, M]: every edge in both directions, once each, sorted by row 0 and then row 1."""
    source, target = edges
    keys = sorted_unique(np.concatenate([source * num_nodes + target, target * num_nodes + source]))
    return np.stack(np.divmod(keys, num_nodes))


def row_pointers(rows: NDArray[Any], num_nodes: int) -> NDArray[np.int64]:
    """Return int64 [N+1]: where each node's entries start in ascending `rows`; nodes without entries keep their row."""
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_nodes), out=indptr[1:])
    return indptr


def among(keys: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which keys occur in the ascending ones (at least one)."""
    at = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return np.asarray(ascending[at] == keys)


def as_ids(name: str, array: Any) -> NDArray[np.int64]:
    """Return ids as int64 (small unsigned ones would wrap in u * N + v); raises InvalidInput unless integers."""
    try:
        ids = np.asarray(array)
    except (TypeError, ValueError) as failure:  # lists of different lengths, a sparse tensor
        _refuse(name, f"ids are an array of integers: {failure}", type(array).__name__)
    if ids.dtype.kind not in "iu":
        _refuse(name, "ids are integers", str(ids.dtype))
    return ids.astype(np.int64)


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
    if raw.split is not None:
        parts.append(("train edges", raw.split.train))
        for name, held_out in (("valid", raw.split.valid), ("test", raw.split.test)):
            parts += _parts(name, held_out)
            _held_out_flaws(name, held_out, add)
    for part, ids in parts:
        unknown = int(np.count_nonzero((ids < 0) | (ids >= n)))
        if unknown:
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
    if pool is not None and (pool.ndim != 2 or pool.shape[1:] != (2,)):
        add(f"{name} pool", "must be [P, 2]", pool.shape)
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
    bad = [
        first + int(row)
        for first in range(0, len(raw.features), _ROWS)
        for row in np.flatnonzero(~np.isfinite(raw.features[first : first + _ROWS]).all(1))
    ]
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
