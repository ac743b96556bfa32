"""Everything that a step or a validation changes: what a checkpoint holds, and all that resuming needs (L3).

No random-number state is among it: micro-batches are pure functions of the step's number, and so is the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

import torch
from torch.optim.swa_utils import AveragedModel

from horovod_trainer.checkpoint import Tensors
from horovod_trainer.comm.base import Communicator
from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.model import LinkPredictor
from horovod_trainer.optim import Adam

MODEL, OPTIMIZER, AVERAGED, BEST = "model", "optimizer", "averaged", "best"  # the groups of a checkpoint's tensors


@dataclass
class Progress:
    """How far a run has come: steps done, the step of its last validation, the best one so far, seconds of training.

    value: by validation MRR (or, without one, by AUC). stale: validations since the best. late: train.max_hours is over.
    """

    step: int = 0
    validated: int = 0
    best_value: float | None = None
    best_epoch: int = 0
    stale: int = 0
    seconds: float = 0.0
    late: bool = False
    resumed_at: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Progress:
        """Return the progress that a checkpoint recorded; raises InvalidInput where it is none."""
        names = {entry.name for entry in fields(cls)}
        if data.keys() != names or not isinstance(data.get("step"), int):
            raise InvalidInput(Problem("progress", "of the checkpoint is damaged, or another version wrote it"))
        return cls(**data)


class TrainState:
    """Model, optimizer, the weights' moving average if there is one, the best weights so far, and the progress."""

    def __init__(self, model: LinkPredictor, optimizer: Adam, averaged: AveragedModel | None) -> None:
        self.model, self.optimizer, self.averaged = model, optimizer, averaged
        self.progress = Progress()
        self.best: dict[str, torch.Tensor] = {}

    @property
    def judged(self) -> LinkPredictor:
        """Return the model that is validated and kept: the average where there is one."""
        return self.model if self.averaged is None else cast(LinkPredictor, self.averaged.module)

    def keep_best(self, value: float, epoch: int) -> bool:
        """Take note of a validation; return whether it is the best so far, whose weights are then kept."""
        state = self.progress
        if value <= (-math.inf if state.best_value is None else state.best_value):
            state.stale += 1
            return False
        state.best_value, state.best_epoch, state.stale = value, epoch, 0
        self.best = {name: tensor.clone() for name, tensor in self.judged.state_dict().items()}
        return True

    def groups(self) -> dict[str, Tensors]:
        """Return the tensors of a checkpoint, by group and name: the state's own, not copies."""
        groups: dict[str, Tensors] = {MODEL: self.model.state_dict(), OPTIMIZER: self.optimizer.tensors()}
        if self.averaged is not None:
            groups[AVERAGED] = self.averaged.state_dict()
        if self.best:
            groups[BEST] = self.best
        return groups

    def load(self, progress: Progress, groups: Mapping[str, Tensors] | None) -> None:
        """Become what a checkpoint recorded; without its tensors, those of the same shapes are there to be overwritten.

        Raises InvalidInput naming every tensor that is missing or of another shape.
        """
        self.progress = progress
        if progress.best_value is not None:
            self.best = {name: torch.zeros_like(tensor) for name, tensor in self.judged.state_dict().items()}
        if groups is None:
            return
        problems = []
        for group, tensors in self.groups().items():
            saved = groups.get(group, {})
            for name in sorted(tensors.keys() | saved.keys()):
                own, theirs = (tuple(x[name].shape) if name in x else "nothing" for x in (tensors, saved))
                if own != theirs:
                    problems.append(Problem(f"{group}: {name}", f"has another shape than this run's, {own}", theirs))
        if problems:
            raise InvalidInput(problems)
        for group, tensors in self.groups().items():
            for name, tensor in tensors.items():
                tensor.copy_(groups[group][name])

    @torch.no_grad()
    def broadcast(self, comm: Communicator) -> None:
        """Overwrite every rank's tensors with rank 0's: optimizer, average and best first, the parameters last."""
        groups = self.groups()
        parameters = groups.pop(MODEL)
        for tensors in (*groups.values(), parameters):
            comm.broadcast_([tensor for _, tensor in sorted(tensors.items())])

    def record(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        return asdict(self.progress)
