"""What is measured about a split before it is trusted: coverage of the negatives, true edges among them, leaks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data import csr
from horovod_trainer.data.graph import RawGraph, Split
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
    train = csr.from_pairs(split.train, graph.num_nodes)

    def measured(held_out: HeldOut) -> dict[str, Any]:
        return {
            **_coverage(graph, held_out, truth),
            **_false_negatives(held_out, truth),
            **_leaks(graph, held_out, train),
        }

    with ThreadPoolExecutor(2) as pool:  # nearly all of it happens without the GIL
        results = pool.map(measured, (split.valid, split.test))
    for name, result in zip(("valid", "test"), results, strict=True):
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
    _mark(tails, seen)
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
    count = int(_count_true(truth.citations_indptr, truth.citations, source, tails, np.zeros(truth.num_nodes, bool)))
    return {"false_negatives": count, "false_negative_share": count / max(1, tails.size)}


def _leaks(graph: RawGraph, held_out: HeldOut, train: csr.Csr) -> dict[str, int]:
    """Return how many held-out edges, and reverses of held-out edges, are among the training edges."""
    source, target = held_out.edge.T
    same, reverse = (train.positions(a, b) >= 0 for a, b in ((source, target), (target, source)))
    if not graph.directed:
        same, reverse = same | reverse, np.zeros_like(reverse)
    return {"also_training": int(same.sum()), "reverse_is_training": int(reverse.sum())}


@compiled
def _mark(ids: Any, seen: Any) -> None:
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            seen[ids[i, j]] = True


@compiled
def _count_true(indptr: Any, citations: Any, source: Any, tails: Any, cited: Any) -> Any:
    """Return how many tails are citations of their row's source; `cited` is False for every node, before and after."""
    count = 0
    for i in range(source.shape[0]):
        start, stop = indptr[source[i]], indptr[source[i] + 1]
        for e in range(start, stop):
            cited[citations[e]] = True
        for j in range(tails.shape[1]):
            count += cited[tails[i, j]]
        for e in range(start, stop):
            cited[citations[e]] = False
    return count
