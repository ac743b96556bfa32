"""The trainer, but rank 1 does in its third step what FAULT says; FAULT=seed gives it another seed from the start."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from horovod_trainer import cli
from horovod_trainer.data.batches import Buffer, MicroBatch, Recipe
from horovod_trainer.errors import Conflict, TrainerError
from horovod_trainer.launchers import launcher_rank

FAULT = os.environ.get("FAULT", "error")


def wait_for_ever() -> None:
    time.sleep(3600)


if launcher_rank() == 1 and FAULT == "seed":
    sys.argv += ["-s", "train.seed=99"]
elif launcher_rank() == 1 and sys.argv[1] == "train":
    build = Recipe.build

    def failing(self: Recipe, epoch: int, step: int, micro: int, buffer: Buffer | None = None) -> MicroBatch:
        batch = build(self, epoch, step, micro, buffer)
        if step == 2:
            if FAULT == "error":
                raise TrainerError("the disk of rank 1 is gone")
            if FAULT == "conflict":
                raise Conflict("the disk of rank 1 is another's")
            if FAULT == "bug":
                raise ZeroDivisionError("of rank 1")
            if FAULT == "hang":
                wait_for_ever()
            if FAULT == "infinity":
                batch.dense()[0] = np.inf
        return batch

    Recipe.build = failing  # type: ignore[method-assign]  # the fault this script exists to make

cli.main()
