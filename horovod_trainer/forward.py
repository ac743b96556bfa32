"""From a micro-batch in host memory to scores; device_forward does the same for one that was made on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod_trainer.aggregate import Hop
from horovod_trainer.data.batches import MicroBatch, Recipe
from horovod_trainer.data.gather import Inputs
from horovod_trainer.model import Dropout, LinkPredictor


def forward(
    model: LinkPredictor, batch: MicroBatch, recipe: Recipe, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pos [P], neg [P, K] and mask [P, K] of a micro-batch; gradients reach every parameter, P = 0 included."""
    drop = Dropout(batch.dropout_key, model.training)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    hops = [Hop.of(block, model.encoder.aggregator) for block in batch.blocks]
    gathered_later = isinstance(batch.inputs, Inputs) and device.type == "cpu"
    h = model.encoder(batch.inputs if gathered_later else tensor(batch.dense()), batch.stored_first_hop, hops, drop)
    # picked at once: each pick's gradient is a table of all rows
    wanted = np.concatenate([batch.source, batch.target, batch.tails.ravel()])
    a, b, tails = h.index_select(0, tensor(wanted)).split([len(batch.source), len(batch.target), batch.tails.size])
    pos = model.decoder(a, b, drop)
    if batch.negatives.shared:
        neg = model.decoder.pooled(a, tails, drop)
    else:
        neg = model.decoder(a[:, None, :], tails.view(len(a), recipe.negative_count, h.shape[1]), drop)
    return pos, neg.reshape(len(a), -1 if len(a) else recipe.negative_count), tensor(batch.negatives.valid)
