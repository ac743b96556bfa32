"""Which device a rank computes on, and whether its micro-batches are made there."""

from __future__ import annotations

import torch

from horovod_trainer.data.batches import Recipe
from horovod_trainer.data.device_batches import DeviceRecipe
from horovod_trainer.data.sampler import ALL
from horovod_trainer.errors import InvalidInput, Problem


def resident(recipe: Recipe, sampler: str, device: torch.device) -> DeviceRecipe | None:
    """Return the recipe resident on the device where batches are made there (sampling.sampler), else None.

    auto makes them there on a GPU, unless a sampled hop takes every neighbour, which the device refuses.
    """
    chosen = sampler == "device" or (sampler == "auto" and device.type == "cuda" and ALL not in recipe.hops)
    return DeviceRecipe.resident(recipe, device) if chosen else None


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return this rank's device: cuda:local_rank when there is one (or asked for), otherwise the CPU."""
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        devices = torch.cuda.device_count()  # 0 in a CPU build of torch
        if local_rank >= devices:
            message = f"local rank {local_rank} needs a GPU of its own, torch sees {devices}; use cpu or fewer slots"
            raise InvalidInput(Problem("train.device", message, wanted))
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
