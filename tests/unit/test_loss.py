"""Losses against numbers worked out by hand and against torch's own formulas, with masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from horovod_trainer.config import LossSection
from horovod_trainer.loss import balanced_correct, link_loss

KINDS = ["bce", "margin", "softmax"]


def sample(p: int = 5, k: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(p * 10 + k)
    pos, neg = torch.randn(p, generator=generator) * 2, torch.randn(p, k, generator=generator) * 2
    mask = torch.rand(p, k, generator=generator) < 0.6
    mask[0] = False  # a positive with no valid negative
    mask[1] = True
    return pos, neg, mask


def row_by_row(config: LossSection, pos: torch.Tensor, neg: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the same loss, one positive at a time, in torch's own formulas."""
    total = torch.zeros(())
    for score, row, keep in zip(pos, neg, mask, strict=True):
        valid = row[keep]
        if config.kind == "softmax":
            logits = torch.cat([score[None], valid]) / config.temperature
            total = total + functional.cross_entropy(logits[None], torch.zeros(1, dtype=torch.int64))
        elif config.kind == "bce":
            total = total + functional.binary_cross_entropy_with_logits(score, torch.ones(()))
            if len(valid):
                total = total + functional.binary_cross_entropy_with_logits(valid, torch.zeros_like(valid))
        elif len(valid):
            ones = torch.ones_like(valid)
            total = total + functional.margin_ranking_loss(score.expand_as(valid), valid, ones, margin=config.margin)
    return total


@pytest.mark.parametrize(
    "config",
    [
        LossSection(kind="bce"), LossSection(kind="margin"), LossSection(kind="margin", margin=0.3),
        LossSection(kind="softmax"), LossSection(kind="softmax", temperature=0.2),
    ],
)  # fmt: skip
def test_equal_to_torchs_formulas_row_by_row(config: LossSection) -> None:
    values = sample()
    grads = []
    for function in (link_loss, row_by_row):
        pos, neg = values[0].clone().requires_grad_(), values[1].clone().requires_grad_()
        loss = function(config, pos, neg, values[2])
        torch.autograd.backward(loss)
        assert neg.grad is not None
        assert not neg.grad[~values[2]].any(), "masked negatives get no gradient"
        grads.append((loss.detach(), pos.grad, neg.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_by_hand() -> None:
    """One positive of score 0 with valid negatives 0 and 2, and a masked one of 100."""
    pos, neg = torch.tensor([0.0]), torch.tensor([[0.0, 100.0, 2.0]])
    mask = torch.tensor([[True, False, True]])
    bce = math.log(2) + (math.log(2) + math.log(1 + math.exp(2))) / 2
    assert float(link_loss(LossSection(kind="bce"), pos, neg, mask)) == pytest.approx(bce)
    assert float(link_loss(LossSection(kind="margin"), pos, neg, mask)) == pytest.approx((1 + 3) / 2)
    assert float(link_loss(LossSection(kind="softmax"), pos, neg, mask)) == pytest.approx(math.log(2 + math.exp(2)))
    warm = LossSection(kind="softmax", temperature=2.0)
    assert float(link_loss(warm, pos, neg, mask)) == pytest.approx(math.log(2 + math.exp(1)))


@pytest.mark.parametrize(("kind", "want"), [("bce", math.log(2)), ("margin", 0.0), ("softmax", 0.0)])
def test_a_positive_without_valid_negatives_keeps_its_own_term(kind: Any, want: float) -> None:
    pos, neg = torch.zeros(1, requires_grad=True), torch.full((1, 3), 50.0, requires_grad=True)
    loss = link_loss(LossSection(kind=kind), pos, neg, torch.zeros(1, 3, dtype=torch.bool))
    torch.autograd.backward(loss)
    assert float(loss.detach()) == pytest.approx(want)
    assert pos.grad is not None
    assert neg.grad is not None
    assert torch.isfinite(pos.grad).all()
    assert not neg.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_sum_to_the_whole(kind: Any) -> None:
    """The loss is a sum over positives: any split over micro-batches and ranks adds up to the same."""
    pos, neg, mask = sample(7, 3)
    config = LossSection(kind=kind)
    parts = [link_loss(config, pos[i:j], neg[i:j], mask[i:j]) for i, j in ((0, 2), (2, 2), (2, 7))]
    torch.testing.assert_close(sum(parts), link_loss(config, pos, neg, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_scores_stay_finite(kind: Any) -> None:
    pos = torch.tensor([-1e4, 1e4], requires_grad=True)
    neg = torch.tensor([[1e4, -1e4], [1e4, 1e4]], requires_grad=True)
    loss = link_loss(LossSection(kind=kind), pos, neg, torch.ones(2, 2, dtype=torch.bool))
    torch.autograd.backward(loss)
    assert pos.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(pos.grad).all()


def test_wrong_shapes_are_named() -> None:
    for pos, neg, mask in (((2, 1), (2, 3), (2, 3)), ((2,), (2, 3), (2, 2)), ((3,), (2, 3), (2, 3))):
        with pytest.raises(ValueError, match="want pos"):
            link_loss(LossSection(), torch.zeros(pos), torch.zeros(neg), torch.ones(mask, dtype=torch.bool))


def test_accuracy_at_one_half_is_balanced() -> None:
    pos = torch.tensor([1.0, -1.0, 2.0])
    neg = torch.tensor([[-1.0, -2.0], [3.0, -3.0], [5.0, -9.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    # right: 1 + 1, 0 + 1/2, 1 + 0, each halved
    assert float(balanced_correct(pos, neg, mask)) == pytest.approx(1.0 + 0.25 + 0.5)
    assert float(balanced_correct(torch.zeros(4), torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool))) == 2.0
