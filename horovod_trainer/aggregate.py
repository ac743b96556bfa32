"""Neighbourhood aggregation with gradients: compiled kernels on CPU, torch ops on any other device.

out[d] = scale[d] * sum of h[cols[e]] over d's entries e (mean, sum), or their elementwise maximum; 0 where there are none.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray

from horovod_trainer.data.gather import Aggregator
from horovod_trainer.data.sampler import Block
from horovod_trainer.jit import compiled, parallel

# numba's default threading layer aborts the process when two threads enter parallel kernels at once
one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Hop:
    """A Block ready to aggregate: numpy CSR (indptr [n+1], cols [m]) and scale float32 [n]."""

    num_dst: int
    num_src: int
    indptr: NDArray[np.int64]
    cols: NDArray[np.int32]
    scale: NDArray[np.float32]

    @classmethod
    def of(cls, block: Block, aggregator: Aggregator) -> Hop:
        """Return the hop of a sampled block: mean divides by the draws, sum scales draws up to what remained."""
        drawn = np.diff(block.indptr)
        top = np.ones(block.num_dst) if aggregator == "mean" else block.remaining
        scale = np.divide(top, drawn, out=np.zeros(block.num_dst), where=drawn > 0)
        return cls(block.num_dst, block.num_src, block.indptr, block.cols, scale.astype(np.float32))


def aggregate(h: torch.Tensor, hop: Hop, aggregator: Aggregator) -> torch.Tensor:
    """Return float32 [num_dst, D] from h [num_src, D], differentiable in h."""
    if h.device.type != "cpu":
        return aggregate_torch(h, hop, aggregator)
    function = _Maximum if aggregator == "max" else _WeightedSum
    result: torch.Tensor = function.apply(h, hop)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return result


def aggregate_torch(h: torch.Tensor, hop: Hop, aggregator: Aggregator) -> torch.Tensor:
    """Return what `aggregate` does, in torch ops: the path of other devices, equal to the kernels within rounding.

    Where a maximum is reached by several rows, torch shares the gradient out among them; the kernels give it to the first.
    """
    cols = torch.from_numpy(hop.cols.astype(np.int64)).to(h.device)
    rows = torch.from_numpy(np.repeat(np.arange(hop.num_dst), np.diff(hop.indptr))).to(h.device)
    out = h.new_zeros(hop.num_dst, h.shape[1])
    if aggregator == "max":
        return out.scatter_reduce(0, rows[:, None].expand(-1, h.shape[1]), h[cols], "amax", include_self=False)
    return out.index_add(0, rows, h[cols]) * torch.from_numpy(hop.scale).to(h.device)[:, None]


def sum_rows(h: torch.Tensor, hop: Hop) -> torch.Tensor:
    """Return the scaled sums float32 [num_dst, D] of h [num_src, D], without a gradient."""
    out = torch.empty(hop.num_dst, h.shape[1])
    with one_at_a_time:
        _sum_rows(hop.indptr, hop.cols, hop.scale, h.detach().contiguous().numpy(), out.numpy())
    return out


def sum_rows_back(grad: torch.Tensor, hop: Hop) -> torch.Tensor:
    """Return the gradient float32 [num_src, D] of `sum_rows` from grad [num_dst, D]."""
    indptr, rows = transpose(hop.indptr, hop.cols, hop.num_src)
    out = torch.empty(hop.num_src, grad.shape[1])
    with one_at_a_time:
        _sum_back(indptr, rows, hop.scale, grad.contiguous().numpy(), out.numpy())
    return out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, hop: Hop) -> torch.Tensor:
        ctx.hop = hop
        return sum_rows(h, hop)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_rows_back(grad, ctx.hop), None


class _Maximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, hop: Hop) -> torch.Tensor:
        out = torch.empty(hop.num_dst, h.shape[1])
        winner = np.empty((hop.num_dst, h.shape[1]), np.int32)
        with one_at_a_time:
            _max_rows(hop.indptr, hop.cols, h.detach().contiguous().numpy(), out.numpy(), winner)
        ctx.winner, ctx.num_src = winner, hop.num_src
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = torch.zeros(ctx.num_src, grad.shape[1])
        _max_back(ctx.winner, grad.contiguous().numpy(), out.numpy())
        return out, None


@parallel
def _sum_rows(indptr: Any, cols: Any, scale: Any, h: Any, out: Any) -> None:
    for d in prange(out.shape[0]):
        out[d, :] = np.float32(0)
        for e in range(indptr[d], indptr[d + 1]):
            row = cols[e]
            for f in range(out.shape[1]):
                out[d, f] += h[row, f]
        for f in range(out.shape[1]):
            out[d, f] *= scale[d]


@parallel
def _sum_back(indptr: Any, rows: Any, scale: Any, grad: Any, out: Any) -> None:
    for s in prange(out.shape[0]):
        out[s, :] = np.float32(0)
        for e in range(indptr[s], indptr[s + 1]):
            d = rows[e]
            for f in range(out.shape[1]):
                out[s, f] += scale[d] * grad[d, f]


@compiled
def transpose(indptr: Any, cols: Any, num_src: Any) -> Any:
    """Return the CSR of the transpose, rows ascending: so the backward sums in a fixed order whatever the threads."""
    t_indptr = np.zeros(num_src + 1, np.int64)
    for e in range(cols.shape[0]):
        t_indptr[cols[e] + 1] += 1
    for s in range(num_src):
        t_indptr[s + 1] += t_indptr[s]
    fill = t_indptr[:-1].copy()
    rows = np.empty(cols.shape[0], np.int32)
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            rows[fill[cols[e]]] = d
            fill[cols[e]] += 1
    return t_indptr, rows


@parallel
def _max_rows(indptr: Any, cols: Any, h: Any, out: Any, winner: Any) -> None:
    for d in prange(out.shape[0]):
        for f in range(out.shape[1]):
            out[d, f] = np.float32(0)
            winner[d, f] = -1
        for e in range(indptr[d], indptr[d + 1]):
            row = cols[e]
            for f in range(out.shape[1]):
                if winner[d, f] < 0 or h[row, f] > out[d, f]:
                    out[d, f] = h[row, f]
                    winner[d, f] = row


@compiled
def _max_back(winner: Any, grad: Any, out: Any) -> None:
    for d in range(winner.shape[0]):
        for f in range(winner.shape[1]):
            if winner[d, f] >= 0:
                out[winner[d, f], f] += grad[d, f]
