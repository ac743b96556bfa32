"""Ranking metrics with OGB's rules, in numpy (L2); every function refuses what it cannot give a meaning to.

Two hits have two names. `hits` is citation2's: the positive's own rank among its own negatives is at most k.
`hits_pooled` is collab's and ppa's: the positive scores strictly above the k-th best of one pool shared by all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.errors import Diverged, InvalidInput, Problem

Scores = NDArray[Any]  # any real dtype; compared as they are, never widened
Ranks = NDArray[np.float64]

CELLS_PER_BLOCK = 2**22  # bounds the temporaries (one byte per cell), whatever the number of queries


def ranks(scores: Scores) -> Ranks:
    """Return the ranks [Q], 1 = best, of the positives in column 0 of scores [Q, 1 + K] among their K negatives.

    OGB's tie rule: halfway between the best and the worst place, 0.5 * (#greater + #greater-or-equal) + 1.
    Raises Diverged when a score is NaN, ValueError on another shape.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores must be [queries, 1 + negatives], got {list(scores.shape)}")
    out = np.empty(len(scores), np.float64)
    rows = max(1, CELLS_PER_BLOCK // scores.shape[1])
    for first in range(0, len(scores), rows):
        block = scores[first : first + rows]
        _refuse_nan(block)
        pos, neg = block[:, :1], block[:, 1:]
        greater = np.count_nonzero(neg > pos, axis=1)
        greater_or_equal = np.count_nonzero(neg >= pos, axis=1)
        out[first : first + rows] = 0.5 * (greater + greater_or_equal) + 1
    return out


def mrr(ranks: Ranks) -> float:
    """Return the mean of 1 / rank over ranks [Q]; raises InvalidInput without queries."""
    return float(np.mean(1.0 / _some(ranks)))


def mean_rank(ranks: Ranks) -> float:
    """Return the mean of ranks [Q]; raises InvalidInput without queries."""
    return float(np.mean(_some(ranks)))


def hits(ranks: Ranks, k: int) -> float:
    """Return the share of ranks [Q] that are at most k (hits@k per query); raises InvalidInput without queries."""
    return float(np.mean(_some(ranks) <= k))


def auc(ranks: Ranks, negatives: int) -> float:
    """Return the mean over queries of the AUC of each positive against its own `negatives` negatives.

    The chance that the positive beats one of its negatives drawn at random, ties counting half; exact, because a tie
    moves OGB's rank by half a place. Raises InvalidInput without queries.
    """
    return float(1.0 - np.mean(_some(ranks) - 1.0) / negatives)


def pooled_auc(pos: Scores, neg: Scores) -> float:
    """Return the AUC of pos [P] against one pool neg [N], ties counting half; exact.

    Raises Diverged when a score is NaN, InvalidInput when either is empty.
    """
    _refuse_nan(pos)
    _refuse_nan(neg)
    if not len(neg):
        raise InvalidInput("nothing to evaluate: the pool of negatives is empty")
    pool = np.sort(neg)
    below = np.searchsorted(pool, _some(pos), "left").sum(dtype=np.int64)
    not_above = np.searchsorted(pool, pos, "right").sum(dtype=np.int64)
    return int(below + not_above) / (2 * len(pos) * len(neg))


def hits_pooled(pos: Scores, neg: Scores, k: int) -> float:
    """Return the share of pos [P] strictly above the k-th best of one pool neg [N] (hits@k of collab and ppa).

    Raises Diverged when a score is NaN and InvalidInput with fewer than k negatives, where OGB would return 1.0.
    """
    _refuse_nan(pos)
    _refuse_nan(neg)
    if len(neg) < k:
        message = f"hits@{k} over a shared pool means nothing with fewer than {k} negatives"
        raise InvalidInput(Problem("evaluate.hits_pooled", message, len(neg)))
    kth_best = np.partition(neg, -k)[-k]
    return float(np.mean(_some(pos) > kth_best))


def _some(values: Scores) -> Scores:
    if not len(values):
        raise InvalidInput("nothing to evaluate: there are no held-out edges")
    return values


def _refuse_nan(scores: Scores) -> None:
    if np.isnan(scores).any():
        raise Diverged("a score is not a number (NaN): the model has diverged")
