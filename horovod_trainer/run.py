"""A run folder: config, metrics, result, weights, plot and checkpoints; earlier runs are kept aside."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from horovod_trainer import checkpoint
from horovod_trainer.assemble import build_model
from horovod_trainer.checkpoint import Checkpoints, sweep
from horovod_trainer.comm.base import Communicator, on_rank_0
from horovod_trainer.config import Config, load_config
from horovod_trainer.console import counted
from horovod_trainer.documents import dump_yaml, write_atomic
from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Problem
from horovod_trainer.model import LinkPredictor
from horovod_trainer.plots import plot_run
from horovod_trainer.telemetry import Telemetry, read_metrics

CHECKPOINTS = checkpoint.FOLDER
WEIGHTS, CONFIG, RESULT, METRICS, PLOT = (
    "model.safetensors",
    "config.yaml",
    "result.json",
    "metrics.jsonl",
    "curves.png",
)


@dataclass(frozen=True)
class GoOn:
    """The run that is gone on with: its folder, its last step, the bytes of its metrics file up to there.

    skipped: step folders of later checkpoints, which are damaged.
    """

    source: Path
    step: int
    metrics_bytes: int
    in_place: bool
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """The folder of the run in progress; only rank 0 writes in it."""

    folder: Path
    telemetry: Telemetry
    checkpoints: Checkpoints

    @classmethod
    def start(cls, folder: Path, comm: Communicator, config: Config, go_on: GoOn | None = None) -> Run:
        """Make the folder; an earlier run in it is first renamed to folder.1, folder.2, ... unless this one goes on there.

        Raises, on every rank, Conflict where another process writes in the folder.
        """
        data = config.model_dump(mode="json")
        checkpoints = Checkpoints(folder, config.checkpoint.keep_last, config.checkpoint.keep_best)

        def make() -> None:
            here = (folder / CHECKPOINTS).is_dir()
            if here:
                checkpoints.lock()
            if go_on is None or not go_on.in_place:
                if keep_earlier(folder) or not here:
                    checkpoints.unlock()
                    checkpoints.lock()
            else:
                sweep(folder)
                checkpoints.skipped = frozenset(go_on.skipped)
            if go_on is not None and not go_on.in_place:
                with suppress(FileNotFoundError):
                    write_atomic(folder / METRICS, (go_on.source / METRICS).read_bytes()[: go_on.metrics_bytes])
            if (folder / RESULT).exists():  # a finished run goes on, and is no longer finished
                os.replace(folder / RESULT, folder / f"earlier-{RESULT}")
            write_atomic(folder / CONFIG, dump_yaml(data))

        keep = (go_on.metrics_bytes, go_on.step) if go_on is not None else None
        try:
            on_rank_0(comm, make)
            telemetry = Telemetry(folder, comm.rank, data, config.output.tensorboard, keep)
        except BaseException:
            checkpoints.unlock()
            raise
        return cls(folder, telemetry, checkpoints)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.telemetry.close()
        self.checkpoints.unlock()

    def finish(self, model: LinkPredictor, result: dict[str, Any]) -> Path:
        """Write weights, plot and, last, the result; return the plot's path."""
        from safetensors.torch import save

        self.telemetry.close()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        write_atomic(self.folder / WEIGHTS, save(weights, {"format": "horovod_trainer 1"}))
        ranks = counted(result["world"]["size"], "rank")
        title = f"{result['data']['name']}, {ranks}, {result['parameters']:,} parameters"
        plot_run(read_metrics(self.folder / METRICS), self.folder / PLOT, title)
        write_atomic(self.folder / RESULT, json.dumps(result, indent=2) + "\n")
        return self.folder / PLOT


def keep_earlier(folder: Path) -> bool:
    """Rename a folder that holds a run, so that a new run never overwrites its results; return whether there was one.

    Raises Conflict when its config.yaml is not a run's, or when the folder is where we are.
    """
    if not (folder / CONFIG).exists():
        return False
    foreign = [e.name for e in folder.iterdir() if e.name not in (CONFIG, CHECKPOINTS) and not e.name.startswith(".")]
    if foreign and not (folder / METRICS).exists():
        raise Conflict(Problem(str(folder), f"holds a {CONFIG} that no run wrote; name another folder in output.dir"))
    place = Path(os.path.abspath(folder))  # has a name, as `.` has not; a link is renamed, not what it leads to
    if Path.cwd().is_relative_to(os.path.realpath(folder)):
        raise Conflict(Problem(str(folder), "holds an earlier run, and cannot be renamed: it is the current folder"))
    number = 1
    while (aside := place.with_name(f"{place.name}.{number}")).exists():
        number += 1
    os.rename(place, aside)
    return True


def load_run_config(folder: Path, overrides: Sequence[str]) -> Config:
    """Return the config of a finished run; raises NotFound when the folder holds none."""
    if not (folder / CONFIG).is_file():
        raise NotFound(Problem(str(folder), f"is not a run folder: it has no {CONFIG}"))
    return load_config([folder / CONFIG], overrides)


def load_model(folder: Path, config: Config, width: int) -> LinkPredictor:
    """Return the run's model with its saved weights, in evaluation mode.

    Raises NotFound without weights, InvalidInput when they are damaged or of another architecture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise NotFound(Problem(str(path), "no weights: the run did not come to its end"))
    try:
        weights = load_file(path)
    except SafetensorError as failure:
        raise InvalidInput(Problem(str(path), f"is damaged: {failure}")) from None
    model = build_model(config, width)
    expected = model.state_dict()
    problems = [Problem(f"{path}: {name}", "is not in the config's model") for name in weights if name not in expected]
    problems += [
        Problem(f"{path}: {name}", f"has another shape than the config's model, {tuple(tensor.shape)}",
                tuple(weights[name].shape) if name in weights else "nothing")
        for name, tensor in expected.items()
        if name not in weights or weights[name].shape != tensor.shape
    ]  # fmt: skip
    if problems:
        raise InvalidInput(problems)
    model.load_state_dict({name: torch.as_tensor(weights[name]) for name in model.state_dict()})
    return model.eval()
