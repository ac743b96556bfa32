"""Two starts on every rank: a cold one, whose AdamW must be untouched, and one from a checkpoint, which must be as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from horovod_trainer.assemble import build_model
from horovod_trainer.checkpoint import Tensors
from horovod_trainer.comm.backends import open_communicator
from horovod_trainer.config import load_config
from horovod_trainer.data.store import open_store
from horovod_trainer.state import Progress
from horovod_trainer.train import Trainer

settings = load_config([], [word for word in sys.argv[1:] if word != "-s"])
store = open_store(Path(settings.data.store))
comm = open_communicator("auto")
trainer = Trainer(settings, store, comm, 1)
fresh = build_model(settings, trainer.recipe.features.width)
for ours, theirs in zip(trainer.model.parameters(), fresh.parameters(), strict=True):
    assert torch.equal(ours, theirs), "a cold start moved the weights"
for tensor in trainer.state.optimizer.tensors().values():
    assert not tensor.any(), "a cold start took a step"

torch.manual_seed(1)  # the same on both ranks, to compare with; rank 1 is given none of it
saved: dict[str, Tensors] = {
    group: {name: (torch.rand(t.shape) * 100).to(t.dtype) for name, t in sorted(tensors.items())}
    for group, tensors in sorted(trainer.state.groups().items())
}
reached = Progress(step=9, validated=9)
trainer.restore(reached, saved if comm.rank == 0 else None)
for group, tensors in trainer.state.groups().items():
    for name, tensor in tensors.items():
        assert torch.equal(tensor, saved[group][name]), f"{group} {name} did not come to rank {comm.rank}"
comm.close()
print("cold start and resumed start are exact", flush=True)
