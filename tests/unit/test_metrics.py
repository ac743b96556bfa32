"""Ranking metrics by hand, against OGB's own evaluator, and what they refuse."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from horovod_trainer import metrics
from horovod_trainer.errors import Diverged, InvalidInput

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def ogb_evaluator(name: str, metric: str) -> Any:
    """Return OGB's evaluator without its constructor, which would ask the network about newer releases."""
    from ogb.linkproppred import Evaluator

    evaluator = Evaluator.__new__(Evaluator)
    evaluator.name, evaluator.eval_metric = name, metric
    if metric.startswith("hits@"):
        evaluator.K = int(metric.removeprefix("hits@"))
    return evaluator


def test_ranks_by_hand_with_ties_half_way() -> None:
    scores = np.array([[3, 1, 2, 0], [1, 3, 2, 1], [1, 1, 1, 1], [0, 1, 2, 3]], np.float32)
    assert metrics.ranks(scores).tolist() == [1.0, 3.5, 2.5, 4.0]


def test_figures_by_hand() -> None:
    ranks = np.array([1.0, 2.0, 4.0, 2.5])
    assert metrics.mrr(ranks) == pytest.approx((1 + 0.5 + 0.25 + 0.4) / 4)
    assert metrics.mean_rank(ranks) == 2.375
    assert [metrics.hits(ranks, k) for k in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert metrics.auc(ranks, 3) == pytest.approx((1 + 2 / 3 + 0 + 1.5 / 3) / 4)


def test_a_constant_score_is_worth_nothing_more_than_chance() -> None:
    ranks = metrics.ranks(np.zeros((7, 1001), np.float32))
    assert metrics.auc(ranks, 1000) == 0.5
    assert metrics.hits(ranks, 10) == 0.0
    assert metrics.pooled_auc(np.ones(3), np.ones(5)) == 0.5
    assert metrics.hits_pooled(np.ones(3), np.ones(5), 5) == 0.0


@pytest.mark.parametrize("ties", [False, True])
def test_mrr_and_hits_equal_ogbs_evaluator_on_torch(ties: bool) -> None:
    draws = np.random.default_rng(1)
    scores = (draws.integers(0, 20, (300, 101)) if ties else draws.normal(size=(300, 101))).astype(np.float32)
    ogb = ogb_evaluator("ogbl-citation2", "mrr").eval(
        {"y_pred_pos": torch.from_numpy(scores[:, 0]), "y_pred_neg": torch.from_numpy(scores[:, 1:])}
    )
    ranks = metrics.ranks(scores)
    assert metrics.mrr(ranks) == pytest.approx(ogb["mrr_list"].double().mean().item(), abs=1e-7)
    for k in (1, 3, 10):
        assert metrics.hits(ranks, k) == pytest.approx(ogb[f"hits@{k}_list"].double().mean().item(), abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 50, 200])
def test_pooled_hits_equal_ogbs_evaluator_on_torch(ties: bool, k: int) -> None:
    draws = np.random.default_rng(2)
    pos, neg = draws.normal(1, 1, 500).astype(np.float32), draws.normal(0, 1, 200).astype(np.float32)
    if ties:
        pos, neg = pos.round(), neg.round()
    ogb = ogb_evaluator("ogbl-collab", f"hits@{k}").eval(
        {"y_pred_pos": torch.from_numpy(pos), "y_pred_neg": torch.from_numpy(neg)}
    )
    assert metrics.hits_pooled(pos, neg, k) == pytest.approx(ogb[f"hits@{k}"], abs=1e-12)


def test_pooled_auc_equals_ogbs_evaluator() -> None:
    draws = np.random.default_rng(3)
    pos, neg = draws.integers(2, 9, 400).astype(np.float32), draws.integers(0, 8, 300).astype(np.float32)
    ogb = ogb_evaluator("ogbl-vessel", "rocauc").eval(
        {"y_pred_pos": torch.from_numpy(pos), "y_pred_neg": torch.from_numpy(neg)}
    )
    assert metrics.pooled_auc(pos, neg) == pytest.approx(ogb["rocauc"], abs=1e-12)


def test_equal_scores_hit_nothing_as_linkpred_06_says() -> None:
    file = SHARED / "inputs/linkpred/06-hits-all-scores-equal.json"
    stated: dict[str, Any] = {"pos": [1] * 4, "neg": [1] * 60, "k": 50, "expected": {"hits@50": 0.0}}
    case = json.loads(file.read_text()) if file.exists() else stated
    pos, neg = np.array(case["pos"]), np.array(case["neg"])
    assert metrics.hits_pooled(pos, neg, case["k"]) == case["expected"][f"hits@{case['k']}"]
    with pytest.raises(InvalidInput, match=r"fewer than 50 negatives \(got 49\)"):
        metrics.hits_pooled(pos, neg[:49], case["k"])


@pytest.mark.parametrize("place", [(0, 0), (4, 0), (2, 3)])
def test_a_nan_score_is_never_ranked(place: tuple[int, int]) -> None:
    scores = np.zeros((5, 4), np.float32)
    scores[place] = np.nan
    with pytest.raises(Diverged, match="NaN"):
        metrics.ranks(scores)


@pytest.mark.parametrize("bad", ["pos", "neg"])
def test_a_nan_score_is_never_pooled(bad: str) -> None:
    scores = {"pos": np.ones(3), "neg": np.ones(3)}
    scores[bad][1] = np.nan
    with pytest.raises(Diverged, match="NaN"):
        metrics.pooled_auc(**scores)
    with pytest.raises(Diverged, match="NaN"):
        metrics.hits_pooled(**scores, k=1)


def test_infinite_scores_have_a_place() -> None:
    assert metrics.ranks(np.array([[np.inf, 0, -np.inf], [-np.inf, 0, -np.inf]])).tolist() == [1.0, 2.5]


def test_nothing_to_evaluate_is_said_not_averaged() -> None:
    none = np.zeros(0)
    for figure in (metrics.mrr, metrics.mean_rank):
        with pytest.raises(InvalidInput, match="no held-out edges"):
            figure(none)
    with pytest.raises(InvalidInput, match="no held-out edges"):
        metrics.pooled_auc(none, np.ones(2))
    with pytest.raises(InvalidInput, match="pool of negatives is empty"):
        metrics.pooled_auc(np.ones(2), none)
    assert metrics.ranks(np.zeros((0, 5))).shape == (0,)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 2)])
def test_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[queries, 1 \+ negatives\]"):
        metrics.ranks(np.zeros(shape))


def test_ranking_needs_little_memory_beside_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CELLS_PER_BLOCK", 2**16)
    scores = np.random.default_rng(0).normal(size=(4000, 501)).astype(np.float32)
    expected = [0.5 * ((row[1:] > row[0]).sum() + (row[1:] >= row[0]).sum()) + 1 for row in scores]
    tracemalloc.start()
    got = metrics.ranks(scores)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert got.tolist() == expected
    assert peak < scores.nbytes / 16
