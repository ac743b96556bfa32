"""What is measured about a split before it is trusted: coverage of the negatives, true edges among them, leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.exclusion import find
from horovod_trainer.data.graph import RawGraph, Split, among
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.store import HeldOut
from horovod_trainer.jit import compiled

FAR_BELOW = 0.8  # ogbl-citation's biased negatives reached half of the nodes that uniform sampling reaches


def check_split(graph: RawGraph, split: Split, truth: Candidates) -> tuple[dict[str, Any], list[str]]:
    """Return the measurements of valid and test by name, and a warning for each that looks wrong.

    truth: the true edges of the whole graph. Shares are in [0, 1].
    """
    checks: dict[str, Any] = {}
    warnings: list[str] = []
    keys = np.sort(split.train[0] * graph.num_nodes + split.train[1])
    for name, held_out in (("valid", split.valid), ("test", split.test)):
        result = {
            **_coverage(graph, held_out, truth),
            **_false_negatives(held_out, truth),
            **_leaks(graph, held_out, keys),
        }
        checks[name] = result
        share, uniform = result["nodes_among_negatives"], result["nodes_if_uniform"]
        if share < FAR_BELOW * uniform:
            warnings.append(
                f"biased {name} negatives: {share:.1%} of the nodes ever occur as one, uniform draws give {uniform:.1%}"
            )
        if result["false_negatives"]:
            rate = result["false_negative_share"]
            warnings.append(f"{result['false_negatives']} of the {name} negatives are true edges (rate {rate:.2g})")
        if result["also_training"]:
            warnings.append(f"{result['also_training']} {name} edges are training edges too")
    return checks, warnings


def _coverage(graph: RawGraph, held_out: HeldOut, truth: Candidates) -> dict[str, float]:
    """Return the share of nodes that occur among the negatives, and its expectation had they been drawn uniformly."""
    if held_out.negatives is not None:
        tails: NDArray[Any] = held_out.negatives
        limits = truth.limits(held_out.edge[:, 0])
        count = held_out.negatives.shape[1]
    else:
        assert held_out.pool is not None
        tails, count = held_out.pool, 2
        limits = np.full(len(held_out.pool), graph.num_nodes, np.int64)
    seen = np.zeros(graph.num_nodes, bool)
    for first in range(0, len(tails), 4096):
        seen[tails[first : first + 4096]] = True
    # the k-th paper by year escapes a query of limit L > k with probability (1 - 1/L)^K
    ranked = np.sort(limits)
    with np.errstate(divide="ignore"):
        escape = np.cumsum((count * np.log1p(-1.0 / ranked))[::-1])[::-1]
    at = np.searchsorted(ranked, np.arange(graph.num_nodes), side="right")
    missed = np.exp(np.append(escape, 0.0)[at])
    return {"nodes_among_negatives": float(seen.mean()), "nodes_if_uniform": float((1.0 - missed).mean())}


def _false_negatives(held_out: HeldOut, truth: Candidates) -> dict[str, float]:
    """Return how many negatives are true edges, and their share."""
    if held_out.negatives is not None:
        source, tails = held_out.edge[:, 0], held_out.negatives
    else:
        assert held_out.pool is not None
        source, tails = held_out.pool[:, 0], held_out.pool[:, 1:]
    count = int(_count_true(truth.citations_indptr, truth.citations, source, tails))
    return {"false_negatives": count, "false_negative_share": count / max(1, tails.size)}


def _leaks(graph: RawGraph, held_out: HeldOut, keys: NDArray[np.int64]) -> dict[str, int]:
    """Return how many held-out edges, and reverses of held-out edges, are among the training edges (ascending keys)."""
    source, target = held_out.edge.astype(np.int64).T
    same, reverse = (among(a * graph.num_nodes + b, keys) for a, b in ((source, target), (target, source)))
    if not graph.directed:
        same, reverse = same | reverse, np.zeros_like(reverse)
    return {"also_training": int(same.sum()), "reverse_is_training": int(reverse.sum())}


@compiled
def _count_true(indptr: Any, citations: Any, source: Any, tails: Any) -> Any:
    count = 0
    for i in range(source.shape[0]):
        start, stop = indptr[source[i]], indptr[source[i] + 1]
        for j in range(tails.shape[1]):
            if find(citations, start, stop, tails[i, j]) >= 0:
                count += 1
    return count
