"""Forward pass of a `DeviceBatch`: torch ops with gradients on padded blocks, no host round trip; not yet run on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_trainer.data.device_batches import DeviceBatch
from horovod_trainer.data.device_counters import dropout_mask
from horovod_trainer.data.device_sampler import PaddedBlock
from horovod_trainer.data.gather import Aggregator
from horovod_trainer.model import Dropout, Encoder, LinkPredictor


class DeviceDropout(Dropout):
    """Dropout whose masks come from torch ops where x is: those of the CPU, to the bit."""

    def __call__(self, x: Tensor, p: float) -> Tensor:
        """Return x with entries zeroed with probability p and the others scaled by 1 / (1 - p)."""
        if p == 0.0 or not self.active:
            return x
        return x * dropout_mask(self.next_key(), p, x.numel(), x.device).view_as(x)


def aggregate_padded(h: Tensor, block: PaddedBlock, aggregator: Aggregator) -> Tensor:
    """Return float32 [num_dst, D] from h [num_src, D], differentiable in h: what `aggregate` does for a CSR block.

    Reads num_dst * fan-out rows into one tensor. A maximum's gradient goes to one row, on CPU the first that reaches it.
    """
    num_dst, fanout = block.neighbours.shape
    sent = h.index_select(0, block.neighbours.flatten()).view(num_dst, fanout, h.shape[1])
    drawn = block.valid.sum(1)
    if aggregator == "max":
        best = sent.masked_fill(~block.valid[:, :, None], -torch.inf).max(1).values
        return best.masked_fill(drawn[:, None] == 0, 0.0)
    top = torch.ones_like(drawn) if aggregator == "mean" else block.remaining
    weight = block.valid * (top.double() / drawn.clamp(min=1)).float()[:, None]
    return torch.bmm(weight[:, None, :], sent).squeeze(1)


def embed(encoder: Encoder, batch: DeviceBatch, drop: Dropout) -> Tensor:
    """Return the seeds' embeddings [seeds with padding, out]: `Encoder.forward` on padded blocks."""
    h = drop(batch.inputs, encoder.input_dropout)
    inwards = list(reversed(batch.blocks))
    for number, layer in enumerate(encoder.layers):
        if number == 0 and batch.stored_first_hop:
            own, aggregated = h.chunk(2, dim=1)
        else:
            block = inwards.pop(0)
            own, aggregated = h[: block.num_dst], aggregate_padded(h, block, encoder.aggregator)
        h = encoder.activate(number, layer(own, aggregated))
        if number < len(encoder.layers) - 1:
            h = drop(h, encoder.dropout)
    return h


def device_forward(model: LinkPredictor, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return pos [P], neg [P, K] and mask [P, K] of a micro-batch; gradients reach every parameter, P = 0 included."""
    drop = DeviceDropout(batch.dropout_key, model.training)
    h = embed(model.encoder, batch, drop)
    a, b = h.index_select(0, batch.source), h.index_select(0, batch.target)
    tails = h.index_select(0, batch.tails.flatten())
    mask = batch.negatives.valid
    pos = model.decoder(a, b, drop)
    if batch.negatives.shared:
        neg = model.decoder.pooled(a, tails, drop)
    else:
        neg = model.decoder(a[:, None, :], tails.view(*mask.shape, h.shape[1]), drop)
    return pos, neg.reshape(mask.shape), mask
