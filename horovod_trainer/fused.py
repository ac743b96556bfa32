"""A SAGE layer on CPU in few passes over memory: one autograd step for the layer, one for what follows it.

Fresh pages cost more than arithmetic here (a ReLU into a new 35 MB tensor took six times the same ReLU in place), so what
can be overwritten is: a layer's output by its activation, and a gradient by the gradient before it. Each gradient that is
overwritten was made by the one function that reads it next; nothing else holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange

from horovod_trainer.aggregate import Hop, one_at_a_time, sum_rows, transpose
from horovod_trainer.counters import TWO32, kept32
from horovod_trainer.data.gather import Inputs
from horovod_trainer.jit import parallel

PART = 4096  # rows gathered at a time: 4 MiB of 256 columns
LINE = 16  # floats of a cache line
BLOCK = 512  # rows whose column sums are added up before those of all
EPSILON = 1e-12  # torch.nn.functional.normalize's
_NONE = np.empty(0, np.float32)


@dataclass(frozen=True)
class Entering:
    """What happens to a layer's input before it is read: bias [in], ReLU, dropout with chance p and the mask of `key`.

    bias: of the layer before, when that left it out: one pass less over its output, and one over the gradient.
    """

    p: float = 0.0
    key: int = 0
    bias: torch.Tensor | None = None


def stored_layer(
    both: torch.Tensor | Inputs, neighbour: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor
) -> torch.Tensor:
    """Return rows @ own.T + neighbourhoods @ neighbour.T (+ bias), float32 [n, out], in one GEMM.

    both: own rows and aggregated neighbourhoods side by side, [n, 2 in], or where to gather them part by part; weights
    [out, in]; differentiable in all tensors.
    """
    function = _GatheredLayer if isinstance(both, Inputs) else _StoredLayer
    out: torch.Tensor = function.apply(both, neighbour, bias, own)  # type: ignore[no-untyped-call]  # torch's
    return out


def hop_layer(
    h: torch.Tensor,
    hop: Hop,
    neighbour: torch.Tensor,
    bias: torch.Tensor,
    own: torch.Tensor,
    entering: Entering | None = None,
) -> torch.Tensor:
    """Return aggregate(h) @ neighbour.T + bias + h[:num_dst] @ own.T: float32 [num_dst, out], from h [num_src, in].

    neighbour and own: weights [out, in]; differentiable in all tensors. With `entering`, h is overwritten by its
    activation first, and nobody else may read it.
    """
    before = None if entering is None else entering.bias  # an argument of its own, so that autograd sees it
    out: torch.Tensor = _HopLayer.apply(h, hop, neighbour, bias, own, entering, before)  # type: ignore[no-untyped-call]  # torch's
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


def roomy(rows: int, columns: int) -> torch.Tensor:
    """Return float32 [rows, columns] with any content, on memory of a size that the next micro-batch asks for too.

    No two micro-batches have as many nodes: sizes to the row would leave holes that the next one does not fit. For the
    same reason not torch.empty: glibc's aligned allocation does not fit into a hole that one of its own size left.
    """
    step = max(1, 1 << max(0, rows.bit_length() - 4))
    floats = -(-rows // step) * step * columns
    whole = np.empty(floats + LINE, np.float32)
    first = -(whole.ctypes.data // 4) % LINE  # GEMMs like rows that begin with a cache line
    return torch.from_numpy(whole[first : first + rows * columns].reshape(rows, columns))


class _StoredLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, both: torch.Tensor, neighbour: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor
    ) -> torch.Tensor:
        weight = torch.cat([own, neighbour], dim=1)
        ctx.save_for_backward(both, weight)
        return _affine(both, weight, bias, roomy(len(both), len(weight)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both, weight = ctx.saved_tensors
        own, neighbour = (grad.t() @ both).chunk(2, dim=1)
        inputs = grad @ weight if ctx.needs_input_grad[0] else None
        return inputs, neighbour, grad.sum(0) if ctx.needs_input_grad[2] else None, own


class _GatheredLayer(torch.autograd.Function):
    """_StoredLayer over parts of PART rows: two gathers instead of the whole in memory from one to the other."""

    @staticmethod
    def forward(
        ctx: Any, both: Inputs, neighbour: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor
    ) -> torch.Tensor:
        weight = torch.cat([own, neighbour], dim=1)
        ctx.both = both
        out = roomy(both.shape[0], len(weight))
        for first, part in _parts(both):
            _affine(part, weight, bias, out[first : first + len(part)])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = torch.zeros(grad.shape[1], ctx.both.shape[1])
        for first, part in _parts(ctx.both):
            weight.addmm_(grad[first : first + len(part)].t(), part)
        own, neighbour = weight.chunk(2, dim=1)
        return None, neighbour, grad.sum(0) if ctx.needs_input_grad[2] else None, own


def _affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _parts(both: Inputs) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) in order; each lasts until the next."""
    rows, columns = both.shape
    buffer = np.empty((min(rows, PART), columns), np.float32)
    for first in range(0, rows, PART):
        last = min(first + PART, rows)
        yield first, torch.from_numpy(both.part(first, last, buffer[: last - first]))


class _HopLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, hop: Hop, neighbour: torch.Tensor, bias: torch.Tensor, own: torch.Tensor,
        entering: Entering | None, before: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if entering is not None:
            values = h.detach().numpy()
            shift = _NONE if before is None else before.detach().numpy()
            with one_at_a_time:
                _activate(values, shift, _NONE, True, entering.p, np.uint64(entering.key), values)
        aggregated = sum_rows(h, hop)
        ctx.hop, ctx.entering = hop, entering
        ctx.save_for_backward(h, aggregated, neighbour, own)
        return torch.addmm(bias, aggregated, neighbour.t()).addmm_(h[: hop.num_dst], own.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, aggregated, neighbour, own = ctx.saved_tensors
        hop: Hop = ctx.hop
        back, columns, own_weight = None, None, grad.t() @ h[: hop.num_dst]
        if ctx.needs_input_grad[0]:  # the inputs of the deepest layer have none, and are the most
            back, columns = _back_through(grad @ neighbour, grad @ own, hop, h, ctx.entering)
        return back, None, grad.t() @ aggregated, grad.sum(0), own_weight, None, columns


def _back_through(
    aggregated: torch.Tensor, own: torch.Tensor, hop: Hop, h: torch.Tensor, entering: Entering | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of a hop's input before its activation, [num_src, in], and of the bias entering there, [in].

    An input that the layer activated is its own, and read here for the last time: the gradient takes its place.
    """
    indptr, rows = transpose(hop.indptr, hop.cols, hop.num_src)
    out = roomy(*h.shape) if entering is None else h.detach()
    with_bias = entering is not None and entering.bias is not None
    sums = np.zeros((-(-len(h) // BLOCK) if with_bias else 0, h.shape[1]), np.float32)
    keep = 1.0 - (entering.p if entering else 0.0)
    with one_at_a_time:
        _hop_back(
            indptr, rows, hop.scale, aggregated.numpy(), own.numpy(), h.detach().numpy(), entering is not None,
            np.float32(1.0 / keep), out.numpy(), sums,
        )  # fmt: skip
    return out, torch.from_numpy(sums.sum(0)) if with_bias else None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, normalise: bool, relu: bool, p: float, key: int) -> torch.Tensor:
        norms = x.new_empty(len(x) if normalise else 0)
        # the gradient of the norm needs the signs that a ReLU takes away; without a norm, the result says it all
        out = torch.empty_like(x) if normalise and relu else x
        with one_at_a_time:
            _activate(x.detach().numpy(), _NONE, norms.numpy(), relu, p, np.uint64(key), out.detach().numpy())
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
def _activate(x: Any, shift: Any, norms: Any, relu: Any, p: Any, key: Any, out: Any) -> None:
    width = x.shape[1]
    scale, threshold = np.float32(1.0 / (1.0 - p)), np.uint64(p * TWO32)
    for i in prange(x.shape[0]):
        if shift.shape[0] > 0:
            for f in range(width):
                x[i, f] += shift[f]
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
                # a NaN stays one, as torch's ReLU keeps it: whether a step is finite is judged by its gradient
                out[i, f] = x[i, f] * scale if kept and not x[i, f] <= 0 else np.float32(0)
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


@parallel
def _hop_back(
    indptr: Any, rows: Any, scale: Any, aggregated: Any, own: Any, h: Any, activated: Any, factor: Any, out: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Add up what a node's readers send back and take it through the activation; `out` may be `h` itself.

    sums [blocks, in]: the columns' sums of every BLOCK rows, unless empty; blocks, so that threads change no bit.
    """
    width, count = out.shape[1], out.shape[0]
    for block in prange((count + BLOCK - 1) // BLOCK):
        total = np.zeros(width, np.float32)
        for s in range(block * BLOCK, min(count, (block + 1) * BLOCK)):
            for f in range(width):
                total[f] = own[s, f] if s < own.shape[0] else np.float32(0)
            for e in range(indptr[s], indptr[s + 1]):
                d = max(rows[e], 0)
                for f in range(width):
                    total[f] += scale[d] * aggregated[d, f]
            for f in range(width):  # what ReLU or dropout set to zero is zero in h
                out[s, f] = (total[f] * factor if h[s, f] > 0 else np.float32(0)) if activated else total[f]
            if sums.shape[0] > 0:
                for f in range(width):
                    sums[block, f] += out[s, f]
