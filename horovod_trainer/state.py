"""Everything that a step or a validation changes: what a checkpoint holds, and all that resuming needs (L3).

No random-number state is among it: micro-batches are pure functions of the step's number, and so is the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.optim.swa_utils import AveragedModel

from horovod_trainer.checkpoint import STATE, Checkpoint, Tensors
from horovod_trainer.comm.base import Communicator
from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.model import LinkPredictor
from horovod_trainer.optim import Adam

MODEL, OPTIMIZER, AVERAGED, BEST = "model", "optimizer", "averaged", "best"  # the groups of a checkpoint's tensors

Natural = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Progress(BaseModel):
    """How far a run has come: steps done, the step of its last validation, the best one so far, seconds of training.

    value: by validation MRR (or, without one, by AUC). stale: validations since the best. late: train.max_hours is over.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    step: Natural = 0
    validated: Natural = 0
    best_value: Finite | None = None
    best_epoch: Natural = 0
    stale: Natural = 0
    seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    late: bool = False
    resumed_at: list[Natural] = []
    validations: list[dict[str, int | float]] = []


class Origin(BaseModel):
    """The data that a run was trained on."""

    model_config = ConfigDict(strict=True)

    name: str
    digest: str


class Recorded(BaseModel):
    """What a checkpoint's state.json says of its run; more may stand there."""

    model_config = ConfigDict(strict=True)

    step: Natural
    micro_batches: Annotated[int, Field(ge=1)]
    metrics_bytes: Natural
    config: dict[str, Any]
    data: Origin
    progress: Progress

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Recorded:
        """Return what a checkpoint recorded; raises InvalidInput naming every field that is missing or impossible."""
        file = f"{checkpoint.folder}/{STATE}"
        try:
            recorded = cls.model_validate(checkpoint.state)
        except ValidationError as failure:
            raise InvalidInput([
                Problem(f"{file}: {'.'.join(map(str, error['loc']))}", f"is damaged: {error['msg']}", error["input"])
                for error in failure.errors()
            ]) from None  # fmt: skip
        if recorded.progress.step != recorded.step:
            message = f"is not the checkpoint's, {recorded.step}"
            raise InvalidInput(Problem(f"{file}: progress.step", message, recorded.progress.step))
        return recorded


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
        return self.progress.model_dump()
