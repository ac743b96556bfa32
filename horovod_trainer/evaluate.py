"""The OGB protocol on any number of ranks: queries in blocks of a fixed grid, every score by one kernel, ranks gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_trainer import metrics
from horovod_trainer.comm.base import Communicator
from horovod_trainer.config import EvaluateSection
from horovod_trainer.counters import Stream, derive_key, permutation
from horovod_trainer.data.exclusion import find
from horovod_trainer.data.gather import Features
from horovod_trainer.data.sampler import Graph
from horovod_trainer.data.store import HeldOut
from horovod_trainer.errors import Diverged
from horovod_trainer.inference import Buffers, Matrix, Progress, embed, nothing, one_thread_per_block, quiet
from horovod_trainer.jit import compiled, reassociated
from horovod_trainer.model import DotDecoder, LinkPredictor, MlpDecoder

QUERIES_PER_BLOCK = 32  # a block is what one thread scores at a time
PAIRS_AT_ONCE = 1024  # through the MLP decoder: 1 MB of 256 floats each, which stays in cache from layer to layer


@dataclass(frozen=True)
class Evaluator:
    """What scoring needs besides a model: the message-passing graph, its inputs, and who shares the work.

    citations: the directed training edges (CSR), to report the MRR without the queries whose reverse is one of them.
    """

    graph: Graph
    features: Features
    comm: Communicator
    config: EvaluateSection
    stored_first_hop: bool
    threads: int
    citations: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None

    def run(
        self,
        model: LinkPredictor,
        held_out: HeldOut,
        *,
        queries: int | None = None,
        seed: int = 0,
        progress: Progress = quiet,
        between: Callable[[], None] = nothing,
    ) -> dict[str, float]:
        """Return the metrics of a split, equal on every rank and for every number of ranks.

        queries: score only that many, a subset fixed by `seed`; None scores all. between: called by every rank between
        two parts of the work; what it raises ends the scoring.
        """
        was_training = model.training
        model.eval()
        h = embed(
            model.encoder, self.graph, self.features, self.comm, stored_first_hop=self.stored_first_hop,
            node_block=self.config.node_block, threads=self.threads, progress=progress, between=between,
        )  # fmt: skip
        between()
        result = self.score(model, h, subset(held_out, queries, seed), progress)
        model.train(was_training)
        return result

    def score(self, model: LinkPredictor, h: Matrix, held_out: HeldOut, progress: Progress = quiet) -> dict[str, float]:
        """Return the metrics of held-out edges from embeddings h [N, D]."""
        edge = np.asarray(held_out.edge)
        negatives = held_out.negatives
        buffers = Buffers()
        if negatives is not None:

            def ranked(first: int, last: int) -> NDArray[np.float64]:
                tails = candidates(edge[first:last, 1], negatives[first:last])
                scores = score_candidates(model, h, edge[first:last, 0], tails, buffers)
                # judged below, where all ranks see it: one rank must not leave the others in a collective
                return np.where(np.isnan(scores).any(1), np.nan, metrics.ranks(np.nan_to_num(scores)))

            ranks = self._shares(len(edge), ranked, np.float64, progress)
            if np.isnan(ranks).any():
                raise Diverged("a score is not a number (NaN): the model has diverged", agreed=True)
            result = ranking(ranks, negatives.shape[1], self.config.hits)
            answered = reciprocal(edge, *self.citations) if self.citations is not None else np.zeros(0, np.bool_)
            if answered.any() and not answered.all():
                result["mrr_without_reciprocal"] = metrics.mrr(ranks[~answered])
            return result
        if held_out.pool is None:
            raise ValueError("held-out edges come with negatives per query or with one shared pool")
        pool = np.asarray(held_out.pool)
        both = np.concatenate([edge, pool])
        flat = self._shares(
            len(both),
            lambda first, last: score_candidates(model, h, both[first:last, 0], both[first:last, 1:], buffers)[:, 0],
            np.float32,
            progress,
            per_block=QUERIES_PER_BLOCK * 1000,
        )
        return pooled(flat[: len(edge)], flat[len(edge) :], self.config.hits_pooled)

    def _shares(
        self,
        total: int,
        score: Callable[[int, int], NDArray[Any]],
        dtype: type[np.floating[Any]],
        progress: Progress,
        per_block: int = QUERIES_PER_BLOCK,
    ) -> NDArray[Any]:
        """Return [total] values of score(first, last) over a fixed grid, each block by one rank, gathered in order."""
        grid = [(first, min(first + per_block, total)) for first in range(0, total, per_block)]
        mine, parts = grid[self.comm.rank :: self.comm.size], []
        with one_thread_per_block(self.threads) as pool:
            for part in pool.map(lambda block: score(*block), mine):
                parts.append(part)
                progress("scores", len(parts), len(mine))
        own = np.concatenate(parts) if parts else np.zeros(0, dtype)
        gathered = [part.numpy() for part in self.comm.allgather(torch.from_numpy(own))]
        out = np.empty(total, dtype)
        taken = [0] * self.comm.size
        for number, (first, last) in enumerate(grid):
            rank = number % self.comm.size
            out[first:last] = gathered[rank][taken[rank] : taken[rank] + last - first]
            taken[rank] += last - first
        return out


def subset(held_out: HeldOut, queries: int | None, seed: int) -> HeldOut:
    """Return `queries` of the held-out edges with their negatives, the same for the same seed; all when None or fewer."""
    if queries is None or queries >= len(held_out.edge):
        return held_out
    chosen = np.sort(permutation(derive_key(seed, Stream.VALIDATION_SUBSET), len(held_out.edge), 0, queries))
    negatives = held_out.negatives[chosen] if held_out.negatives is not None else None
    return HeldOut(edge=held_out.edge[chosen], negatives=negatives, pool=held_out.pool)


def reciprocal(edge: NDArray[Any], indptr: NDArray[np.int64], citations: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return bool [Q]: whether the reverse of a held-out edge [Q, 2] is a training citation, so the graph shows the pair."""
    out = np.zeros(len(edge), np.bool_)
    _reciprocal(edge.astype(np.int64), indptr, citations, out)
    return out


@compiled
def _reciprocal(edge: Any, indptr: Any, citations: Any, out: Any) -> None:
    for q in range(edge.shape[0]):
        start, stop = indptr[edge[q, 1]], indptr[edge[q, 1] + 1]
        out[q] = find(citations, start, stop, edge[q, 0]) >= 0


def candidates(target: NDArray[Any], negatives: NDArray[Any]) -> NDArray[np.int64]:
    """Return [Q, 1 + K] tails, the true one first."""
    return np.concatenate([target[:, None], negatives], axis=1).astype(np.int64)


def score_candidates(
    model: LinkPredictor, h: Matrix, source: NDArray[Any], tails: NDArray[Any], buffers: Buffers | None = None
) -> Matrix:
    """Return float32 [Q, C] scores of every source [Q] with its tails [Q, C], a query's own all in one call.

    buffers: where the MLP decoder's activations may lie from one call to the next.
    """
    out = np.empty(tails.shape, np.float32)
    source, tails = source.astype(np.int64), tails.astype(np.int64)
    if isinstance(model.decoder, DotDecoder):
        _dot_scores(h, source, tails, out)
        return out
    buffers = buffers or Buffers()
    at_once = max(1, PAIRS_AT_ONCE // max(1, tails.shape[1]))  # queries
    for first in range(0, len(tails), at_once):
        some = slice(first, first + at_once)
        products = buffers.get("products", tails[some].size, h.shape[1])
        _products(h, source[some], tails[some], products.numpy())
        out[some] = _mlp_scores(model.decoder, products, buffers).reshape(out[some].shape)
    return out


def _mlp_scores(decoder: MlpDecoder, products: torch.Tensor, buffers: Buffers) -> Matrix:
    """Return float32 [n] scores from the elementwise products [n, D] of pairs: the decoder's forward, in place."""
    with torch.inference_mode():
        *hidden, last = (cast(torch.nn.Linear, layer) for layer in decoder.layers)
        x = products.to(last.weight.device)
        for number, layer in enumerate(hidden):
            y = buffers.get(f"hidden {number}", len(x), layer.out_features, x.device)
            x = torch.addmm(layer.bias, x, layer.weight.t(), out=y).relu_()
        scores: Matrix = last(x)[:, 0].cpu().numpy()
        return scores


@compiled
def _products(h: Any, source: Any, tails: Any, out: Any) -> None:
    row = 0
    for q in range(tails.shape[0]):
        a = h[source[q]]
        for c in range(tails.shape[1]):
            b = h[tails[q, c]]
            for f in range(a.shape[0]):
                out[row, f] = a[f] * b[f]
            row += 1


# reassociation lets the sum use vector lanes; positives and negatives run the same instructions, so equal rows still tie
@reassociated
def _dot_scores(h: Any, source: Any, tails: Any, out: Any) -> None:
    for q in range(tails.shape[0]):
        a = h[source[q]]
        for c in range(tails.shape[1]):
            b = h[tails[q, c]]
            total = np.float32(0)
            for f in range(a.shape[0]):
                total += a[f] * b[f]
            out[q, c] = total


def ranking(ranks: NDArray[np.float64], negatives: int, hits: tuple[int, ...]) -> dict[str, float]:
    """Return MRR, mean rank, AUC and hits@k per query of ranks [Q] among `negatives` candidates each.

    A k above the number of negatives is left out: everything would be a hit.
    """
    result = {
        "mrr": metrics.mrr(ranks),
        "mean_rank": metrics.mean_rank(ranks),
        "auc": metrics.auc(ranks, negatives),
    }
    return result | {f"hits@{k}": metrics.hits(ranks, k) for k in hits if k <= negatives}


def pooled(pos: NDArray[np.float32], neg: NDArray[np.float32], hits: tuple[int, ...]) -> dict[str, float]:
    """Return AUC and hits@k_pooled of positives against one shared pool (ogbl-collab, ogbl-ppa)."""
    result = {"auc": metrics.pooled_auc(pos, neg)}
    return result | {f"hits@{k}_pooled": metrics.hits_pooled(pos, neg, k) for k in hits}
