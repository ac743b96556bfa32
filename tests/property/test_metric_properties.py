"""Ranking metrics on scores full of ties: equal to OGB's evaluator, to the definition, and to themselves."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from horovod_trainer import metrics

Array = NDArray[Any]

no_deadline = settings(deadline=None)  # a busy machine is no failure

few_values = st.integers(-2, 2).map(float)  # so that most scores tie
matrices = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(2, 8)), elements=few_values)
vectors = hnp.arrays(np.float32, st.integers(1, 12), elements=few_values)


def ogb_evaluator(metric: str, k: int = 0) -> Any:
    """Return OGB's evaluator without its constructor, which would ask the network about newer releases."""
    from ogb.linkproppred import Evaluator

    evaluator = Evaluator.__new__(Evaluator)
    evaluator.name, evaluator.eval_metric, evaluator.K = "ours", metric, k
    return evaluator


@no_deadline
@given(matrices)
def test_every_rank_is_ogbs(scores: Array) -> None:
    ogb = ogb_evaluator("mrr").eval(
        {"y_pred_pos": torch.from_numpy(scores[:, 0].copy()), "y_pred_neg": torch.from_numpy(scores[:, 1:].copy())}
    )
    ranks = metrics.ranks(scores)
    np.testing.assert_array_equal((1 / ranks).astype(np.float32), ogb["mrr_list"].numpy())
    for k in (1, 3, 10):
        np.testing.assert_array_equal(ranks <= k, ogb[f"hits@{k}_list"].numpy())


@no_deadline
@given(matrices)
def test_auc_is_the_chance_to_beat_a_negative(scores: Array) -> None:
    pos, neg = scores[:, :1], scores[:, 1:]
    by_definition = np.mean((neg < pos) + 0.5 * (neg == pos))
    assert np.isclose(metrics.auc(metrics.ranks(scores), neg.shape[1]), by_definition, atol=1e-12)


@no_deadline
@given(vectors, vectors)
def test_pooled_auc_counts_all_pairs(pos: Array, neg: Array) -> None:
    pairs = (neg[None, :] < pos[:, None]) + 0.5 * (neg[None, :] == pos[:, None])
    assert np.isclose(metrics.pooled_auc(pos, neg), pairs.mean(), atol=1e-12)


@no_deadline
@given(vectors, vectors, st.data())
def test_pooled_hits_are_ogbs(pos: Array, neg: Array, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(neg)))
    ogb = ogb_evaluator(f"hits@{k}", k).eval({"y_pred_pos": torch.from_numpy(pos), "y_pred_neg": torch.from_numpy(neg)})
    assert np.isclose(metrics.hits_pooled(pos, neg, k), ogb[f"hits@{k}"], atol=1e-12)


@no_deadline
@given(matrices, st.randoms(use_true_random=False))
def test_the_order_of_negatives_and_a_monotone_map_change_nothing(scores: Array, random: Any) -> None:
    order = [0, *random.sample(range(1, scores.shape[1]), scores.shape[1] - 1)]
    np.testing.assert_array_equal(metrics.ranks(scores[:, order] * 3 + 1), metrics.ranks(scores))
