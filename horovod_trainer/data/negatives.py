"""Training negatives: drawn, masked and counted. Rejected against training citations only, never against held-out ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.counters import draw_below
from horovod_trainer.data.exclusion import find
from horovod_trainer.jit import compiled


@dataclass(frozen=True)
class Candidates:
    """Which tails may be drawn: all nodes, or with years only those not later than the source.

    citations_indptr / citations: what counts as a source's own training citation (CSR, ascending rows).
    by_year: node ids by ascending year; up_to[y - first_year]: how many of them are not later than y.
    """

    num_nodes: int
    citations_indptr: NDArray[np.int64]
    citations: NDArray[np.int32]
    year: NDArray[np.int32] | None
    by_year: NDArray[np.int32]
    up_to: NDArray[np.int64]
    first_year: int = 0

    @classmethod
    def build(
        cls, indptr: NDArray[np.int64], citations: NDArray[np.int32], year: NDArray[np.int32] | None
    ) -> Candidates:
        """Return the candidates of a graph whose nodes have these training citations and, perhaps, years (int32 [N])."""
        nothing = np.zeros(0, np.int32)
        if year is None:
            return cls(len(indptr) - 1, indptr, citations, None, nothing, np.zeros(0, np.int64))
        order = np.argsort(year, kind="stable").astype(np.int32)
        first = int(year[order[0]])
        return cls(len(indptr) - 1, indptr, citations, year, order, np.cumsum(np.bincount(year - first)), first)

    def limits(self, source: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return how many candidates each source has: int64 [len(source)]."""
        if self.year is None:
            return np.full(len(source), self.num_nodes, np.int64)
        return self.up_to[self.year[source] - self.first_year]

    def tails(self, draws: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the node ids of draws on [0, limit)."""
        return draws.astype(np.int32) if self.year is None else self.by_year[draws]


@dataclass(frozen=True)
class Negatives:
    """tails: int32 [P, K] or, shared, [K]; valid: bool [P, K]; drawn / citing: pairs drawn / of those, true training edges."""

    tails: NDArray[np.int32]
    valid: NDArray[np.bool_]
    shared: bool
    drawn: int
    citing: int


def draw_uniform(
    candidates: Candidates, source: NDArray[np.int32], target: NDArray[np.int32], count: int, key: int
) -> Negatives:
    """Return `count` tails per positive (source[i], target[i]), each uniform over the source's candidates."""
    tails = candidates.tails(draw_below(key, candidates.limits(source), count))
    return _masked(candidates, source, target, tails, shared=False)


def draw_shared(
    candidates: Candidates, source: NDArray[np.int32], target: NDArray[np.int32], count: int, key: int
) -> Negatives:
    """Return one pool of `count` tails for all positives, uniform over what the latest source may cite."""
    limit = candidates.limits(source).max(initial=1)
    pool = candidates.tails(draw_below(key, np.full(1, limit, np.int64), count))[0]
    return _masked(candidates, source, target, pool, shared=True)


def _masked(
    candidates: Candidates,
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    tails: NDArray[np.int32],
    *,
    shared: bool,
) -> Negatives:
    valid = np.ones((len(source), tails.shape[-1]), np.bool_)
    year = candidates.year if candidates.year is not None else np.zeros(0, np.int32)
    mask = _mask_shared if shared else _mask_rows
    citing = mask(candidates.citations_indptr, candidates.citations, year, source, target, tails, valid)
    return Negatives(tails, valid, shared, valid.size, int(citing))


@compiled
def _mask_rows(indptr: Any, citations: Any, year: Any, source: Any, target: Any, tails: Any, valid: Any) -> Any:
    citing = 0
    for i in range(source.shape[0]):
        start, stop = indptr[source[i]], indptr[source[i] + 1]
        for j in range(tails.shape[1]):
            tail = tails[i, j]
            if find(citations, start, stop, tail) >= 0:
                citing += 1
                valid[i, j] = False
            elif tail == target[i] or tail == source[i] or (year.shape[0] > 0 and year[tail] > year[source[i]]):
                valid[i, j] = False
    return citing


@compiled
def _mask_shared(indptr: Any, citations: Any, year: Any, source: Any, target: Any, pool: Any, valid: Any) -> Any:
    order = np.argsort(pool)
    ranked = pool[order]
    citing = 0
    for i in range(source.shape[0]):
        start, stop = indptr[source[i]], indptr[source[i] + 1]
        for c in range(start, stop + 2):  # its citations, then its target and itself
            tail = citations[c] if c < stop else (target[i] if c == stop else source[i])
            at = np.searchsorted(ranked, tail)
            while at < ranked.shape[0] and ranked[at] == tail:
                if valid[i, order[at]]:
                    valid[i, order[at]] = False
                    if c < stop:
                        citing += 1
                at += 1
        if year.shape[0] > 0:
            limit = year[source[i]]
            for j in range(pool.shape[0]):
                if year[pool[j]] > limit:
                    valid[i, j] = False
    return citing
