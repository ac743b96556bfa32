"""Scoring held-out edges: the grid, the tie of equal embeddings, pools, subsets and reciprocal queries."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from horovod_trainer.comm.base import Communicator, Solo, ThreadWorld
from horovod_trainer.config import EvaluateSection, ModelSection
from horovod_trainer.data.gather import Features
from horovod_trainer.data.sampler import Graph
from horovod_trainer.data.store import HeldOut
from horovod_trainer.evaluate import Evaluator, candidates, reciprocal, score_candidates, subset
from horovod_trainer.inference import Buffers
from horovod_trainer.model import Dropout, LinkPredictor

Decoder = Literal["dot", "mlp"]

NODES, WIDTH, QUERIES = 50, 24, 37
RNG = np.random.default_rng(0)
H = RNG.standard_normal((NODES, WIDTH)).astype(np.float32)
EDGE = RNG.integers(0, NODES, (QUERIES, 2)).astype(np.int32)
NEGATIVES = RNG.integers(0, NODES, (QUERIES, 20)).astype(np.int32)
GRAPH = Graph(np.zeros(NODES + 1, np.int64), np.zeros(0, np.int32))


def model(decoder: Decoder) -> LinkPredictor:
    section = ModelSection(layers=1, hidden=WIDTH, out=WIDTH, decoder_hidden=8, decoder=decoder)
    return LinkPredictor(section, 4, seed=1).eval()


def evaluator(comm: Communicator, hits_pooled: tuple[int, ...] = ()) -> Evaluator:
    features = Features(np.zeros((NODES, 4), np.float32))
    return Evaluator(GRAPH, features, comm, EvaluateSection(hits_pooled=hits_pooled), False, 1)


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
def test_metrics_are_the_same_on_1_2_and_4_ranks(decoder: Decoder) -> None:
    held_out = HeldOut(EDGE, NEGATIVES)
    built = model(decoder)  # once: initialisation uses torch's one generator, which threads would share
    alone = evaluator(Solo()).score(built, H, held_out)
    assert 0 < alone["mrr"] < 1
    for size in (2, 4):
        together = ThreadWorld(size).run(lambda comm: evaluator(comm).score(built, H, held_out))
        assert together == [alone] * size


def test_dot_scores_are_dot_products() -> None:
    tails = candidates(EDGE[:, 1], NEGATIVES)
    scores = score_candidates(model("dot"), H, EDGE[:, 0], tails)
    wanted = np.einsum("qd,qcd->qc", H[EDGE[:, 0]].astype(np.float64), H[tails].astype(np.float64))
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 21, 2000])  # many queries at once, some, one that is more than fits
def test_mlp_scores_are_the_decoder_s(columns: int) -> None:
    queries = max(3, 3000 // columns)
    rng = np.random.default_rng(columns)
    source, tails = rng.integers(0, NODES, queries), rng.integers(0, NODES, (queries, columns))
    built, buffers = model("mlp"), Buffers()
    with torch.no_grad():
        wanted = built.decoder(torch.from_numpy(H[source])[:, None], torch.from_numpy(H[tails]), Dropout(0, False))
    for _ in range(2):  # what lies in the buffers from before changes nothing
        scores = score_candidates(built, H, source, tails, buffers)
        np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
def test_equal_embeddings_tie(decoder: Decoder) -> None:
    same = np.tile(H[:1], (NODES, 1))
    result = evaluator(Solo()).score(model(decoder), same, HeldOut(EDGE, NEGATIVES))
    assert result["mean_rank"] == 0.5 * NEGATIVES.shape[1] + 1  # nobody above, all equal


def test_a_shared_pool_gives_pooled_hits_only() -> None:
    pool = RNG.integers(0, NODES, (60, 2)).astype(np.int32)
    alone = evaluator(Solo(), (10,)).score(model("dot"), H, HeldOut(EDGE, pool=pool))
    assert set(alone) == {"auc", "hits@10_pooled"}
    pos, neg = ((H[pairs[:, 0]] * H[pairs[:, 1]]).sum(1) for pairs in (EDGE, pool))
    assert alone["hits@10_pooled"] == np.mean(pos > np.sort(neg)[-10])
    assert (
        ThreadWorld(2).run(lambda c: evaluator(c, (10,)).score(model("dot"), H, HeldOut(EDGE, pool=pool)))[1] == alone
    )


def test_a_subset_is_fixed_by_its_seed() -> None:
    held_out = HeldOut(EDGE, NEGATIVES)
    first, again, other = subset(held_out, 10, 1), subset(held_out, 10, 1), subset(held_out, 10, 2)
    assert len(first.edge) == 10
    np.testing.assert_array_equal(first.edge, again.edge)
    assert not np.array_equal(first.edge, other.edge)
    assert subset(held_out, 99, 1) is held_out


def test_queries_whose_reverse_is_a_training_citation() -> None:
    """Training cites 1 -> 0 and 2 -> 0; the held-out 0 -> 1 is answered by the graph, 1 -> 2 is not."""
    indptr, citations = np.array([0, 0, 1, 2]), np.array([0, 0], np.int32)
    edge = np.array([[0, 1], [1, 2], [0, 2], [2, 1]], np.int32)
    assert reciprocal(edge, indptr, citations).tolist() == [True, False, True, False]
