"""The trainer, but rank 1 fails in its third step, or (OTHER_SEED=1) was given another seed."""

from __future__ import annotations

import os
import sys

from horovod_trainer import cli
from horovod_trainer.data.batches import Buffer, MicroBatch, Recipe
from horovod_trainer.errors import TrainerError
from horovod_trainer.launchers import launcher_rank

if launcher_rank() == 1 and os.environ.get("OTHER_SEED"):
    sys.argv += ["-s", "train.seed=99"]
elif launcher_rank() == 1:
    build = Recipe.build

    def failing(self: Recipe, epoch: int, step: int, micro: int, buffer: Buffer | None = None) -> MicroBatch:
        if step == 2:
            raise TrainerError("the disk of rank 1 is gone")
        return build(self, epoch, step, micro, buffer)

    Recipe.build = failing  # type: ignore[method-assign]  # the fault this script exists to make

cli.main()
