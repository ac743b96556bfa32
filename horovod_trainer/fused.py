"""A SAGE layer on CPU in few passes over memory: one autograd step for the layer, one for what follows it.

Fresh pages cost more than arithmetic here (a ReLU into a new 35 MB tensor took six times the same ReLU in place), so what
can be overwritten is: a layer's output by its activation, and a gradient by the gradient before it. Each gradient that is
overwritten was made by the one function that reads it next; nothing else holds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange

from horovod_trainer.aggregate import Hop, one_at_a_time, sum_rows, sum_rows_back
from horovod_trainer.counters import TWO32, kept32
from horovod_trainer.jit import parallel

EPSILON = 1e-12  # torch.nn.functional.normalize's


def hop_layer(
    h: torch.Tensor, hop: Hop, neighbour: torch.Tensor, bias: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return aggregate(h) @ neighbour.T + bias + h[:num_dst] @ own.T: float32 [num_dst, out], from h [num_src, in].

    neighbour and own: weights [out, in]; differentiable in all four tensors.
    """
    out: torch.Tensor = _HopLayer.apply(h, hop, neighbour, bias, own)  # type: ignore[no-untyped-call]  # torch's
    return out


def activate(x: torch.Tensor, *, normalise: bool, relu: bool, p: float, key: int) -> torch.Tensor:
    """Return dropout(relu(x / |x|)) of rows x [n, D], each part only when asked for; x is overwritten.

    p: the chance that an entry is dropped, with the mask of `counters.dropout_mask(key, p, n * D)`; 0 drops nothing.
    Raises ValueError for dropout without a ReLU: the gradient takes both from where the result is zero.
    """
    if p > 0 and not relu:
        raise ValueError("dropout here follows a ReLU")
    out: torch.Tensor = _Activate.apply(x, normalise, relu, p, key)  # type: ignore[no-untyped-call]  # torch's
    return out


class _HopLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, hop: Hop, neighbour: torch.Tensor, bias: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        aggregated = sum_rows(h, hop)
        ctx.hop = hop
        ctx.save_for_backward(h, aggregated, neighbour, own)
        return torch.addmm(bias, aggregated, neighbour.t()).addmm_(h[: hop.num_dst], own.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, aggregated, neighbour, own = ctx.saved_tensors
        hop: Hop = ctx.hop
        back = sum_rows_back(grad @ neighbour, hop)
        back[: hop.num_dst].addmm_(grad, own)
        return back, None, grad.t() @ aggregated, grad.sum(0), grad.t() @ h[: hop.num_dst]


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, normalise: bool, relu: bool, p: float, key: int) -> torch.Tensor:
        norms = x.new_empty(len(x) if normalise else 0)
        # the gradient of the norm needs the signs that a ReLU takes away; without a norm, the result says it all
        out = torch.empty_like(x) if normalise and relu else x
        with one_at_a_time:
            _activate(x.detach().numpy(), norms.numpy(), relu, p, np.uint64(key), out.detach().numpy())
        if out is x:
            ctx.mark_dirty(x)
        ctx.relu, ctx.p = relu, p
        ctx.save_for_backward(*([x, out, norms] if out is not x else [out, norms]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *unit, out, norms = ctx.saved_tensors
        grad = grad.contiguous()
        with one_at_a_time:
            _activate_back(
                (unit[0] if unit else out).detach().numpy(), out.detach().numpy(), norms.numpy(), ctx.relu, ctx.p,
                grad.numpy(),
            )  # fmt: skip
        return grad, None, None, None, None


@parallel
def _activate(x: Any, norms: Any, relu: Any, p: Any, key: Any, out: Any) -> None:
    width = x.shape[1]
    scale, threshold = np.float32(1.0 / (1.0 - p)), np.uint64(p * TWO32)
    for i in prange(x.shape[0]):
        if norms.shape[0] > 0:
            square = x[i, 0] * x[i, 0]
            for f in range(1, width):
                square += x[i, f] * x[i, f]
            norms[i] = max(np.sqrt(square), EPSILON)
            for f in range(width):
                x[i, f] /= norms[i]
        if p > 0.0:
            first = np.uint64(i) * np.uint64(width)
            for f in range(width):
                kept = kept32(key, threshold, first + np.uint64(f))
                out[i, f] = x[i, f] * scale if kept and x[i, f] > 0 else np.float32(0)
        elif relu:
            for f in range(width):
                out[i, f] = max(x[i, f], np.float32(0))


@parallel
def _activate_back(unit: Any, out: Any, norms: Any, relu: Any, p: Any, grad: Any) -> None:
    """Overwrite grad. What ReLU or dropout set to zero is zero in `out`: no mask is kept."""
    width = out.shape[1]
    scale = np.float32(1.0 / (1.0 - p))
    for i in prange(out.shape[0]):
        if relu:
            for f in range(width):
                grad[i, f] = grad[i, f] * scale if out[i, f] != 0 else np.float32(0)
        if norms.shape[0] > 0:
            along = grad[i, 0] * unit[i, 0]
            for f in range(1, width):
                along += grad[i, f] * unit[i, f]
            if norms[i] <= EPSILON:  # the clamp's gradient is zero
                along = along * 0
            for f in range(width):
                grad[i, f] = (grad[i, f] - along * unit[i, f]) / norms[i]
