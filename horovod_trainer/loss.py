"""Losses over pos[P], neg[P, K] and mask[P, K] (True = counts): logits in, the sum over positives out.

Each positive is averaged over its own valid negatives first, so a positive with few of them weighs as much as any other.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from horovod_trainer.config import LossSection


def link_loss(config: LossSection, pos: torch.Tensor, neg: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the scalar sum over the P positives; the caller divides by the step's global number of positives.

    bce: softplus(-pos) + mean softplus(neg). margin: mean relu(margin - pos + neg). softmax: the cross-entropy of the
    positive among itself and its valid negatives, scores divided by the temperature. A positive without a valid negative
    keeps its own term only.
    """
    if pos.ndim != 1 or neg.shape != mask.shape or neg.shape[0] != pos.shape[0]:
        raise ValueError(f"want pos [P], neg [P, K], mask [P, K]; got {pos.shape}, {neg.shape}, {mask.shape}")
    if config.kind == "softmax":
        return _softmax(pos / config.temperature, neg / config.temperature, mask)
    if config.kind == "margin":
        return _mean_valid(functional.relu(config.margin - pos[:, None] + neg), mask).sum()
    return (functional.softplus(-pos) + _mean_valid(functional.softplus(neg), mask)).sum()


def balanced_correct(pos: torch.Tensor, neg: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum over positives of the accuracy at probability 0.5 on balanced pairs: half positive, half negatives.

    A positive without a valid negative counts alone.
    The figure the seed project quotes; say it beside the MRR, never instead of it.
    """
    found, rejected = (pos > 0).to(pos.dtype), _mean_valid((neg <= 0).to(pos.dtype), mask)
    return torch.where(mask.any(1), 0.5 * (found + rejected), found).sum()


def _mean_valid(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _softmax(pos: torch.Tensor, neg: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = torch.cat([pos[:, None], neg.masked_fill(~mask, -torch.inf)], dim=1)
    return (torch.logsumexp(logits, dim=1) - pos).sum()
