"""How a run begins: from nothing, from a checkpoint, or not at all, because it is finished. Rank 0 looks, all agree (L4)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from horovod_trainer.checkpoint import FOLDER, STATE, Checkpoint, Checkpoints, Tensors, read_checkpoint
from horovod_trainer.comm.base import Communicator, on_rank_0
from horovod_trainer.config import Config
from horovod_trainer.console import get_logger
from horovod_trainer.documents import load_yaml
from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Problem
from horovod_trainer.run import CONFIG, RESULT, GoOn
from horovod_trainer.state import Origin, Recorded

# What may be another on resuming. Where and how a run computes:
MACHINE = (
    "checkpoint", "data", "launch", "output", "sampling.sampler", "train.communicator", "train.device", "train.log_every",
    "train.prefetch", "train.threads", "train.watchdog_s",
)  # fmt: skip
# How long it goes on and how it is judged:
LIMITS = ("evaluate", "train.epochs", "train.max_hours", "train.max_steps", "train.patience")
# `data` is compared by what the store holds: its digest

log = get_logger()


@dataclass(frozen=True)
class Start:
    """How a run begins. config: with train.micro_batches as the checkpoint has it, so that the global batch stays.

    recorded: what the checkpoint says that it goes on from; tensors: the checkpoint's groups, on rank 0 alone.
    result: of the run that is finished already.
    """

    config: Config
    recorded: Recorded | None = None
    go_on: GoOn | None = None
    tensors: dict[str, Tensors] | None = None
    result: dict[str, Any] | None = None


def begin(comm: Communicator, config: Config, data_digest: str, wanted: str) -> Start:
    """Return how the run begins, the same on every rank.

    wanted: auto (go on where output.dir holds an unfinished run, report a finished one of the same config), never, or a
    run folder or step folder to go on from. Raises Conflict naming every field in which the checkpoint is of another
    run, NotFound without one in a folder that was named, InvalidInput where none is whole.
    """
    found: list[Checkpoint] = []

    def choose() -> dict[str, Any]:
        if wanted == "never":
            return {}
        if wanted == "auto":
            source = Path(config.output.dir)
            result = read_result(source)
            if result is not None:
                return {"result": result} if is_of(result, source, config, data_digest) else {}
            checkpoint = Checkpoints(source, 1, 0).latest() if (source / CONFIG).is_file() else None
            if checkpoint is None:
                return {}
        else:
            source, checkpoint = _named(wanted, config)
        recorded = Recorded.of(checkpoint)
        refuse_other(recorded, config, data_digest, source)
        found.append(checkpoint)
        recorded.progress.resumed_at.append(recorded.step)
        return {"source": str(source), "recorded": recorded.model_dump(mode="json"), "skipped": checkpoint.skipped}

    said = on_rank_0(comm, choose)
    if "result" in said:
        return Start(config, result=said["result"])
    if not said:
        return Start(config)
    recorded, source = Recorded.model_validate(said["recorded"]), Path(said["source"])
    train = config.train.model_copy(update={"micro_batches": recorded.micro_batches})
    in_place = _same(source, Path(config.output.dir))
    go_on = GoOn(source, recorded.step, recorded.metrics_bytes, in_place, tuple(said["skipped"]))
    return Start(config.model_copy(update={"train": train}), recorded, go_on, found[0].groups if found else None)


class Scored(BaseModel):
    """A finished run's result, as far as it is shown again; more stands there."""

    model_config = ConfigDict(strict=True, extra="allow")

    valid: dict[str, float]
    test: dict[str, float]
    best_epoch: int
    steps: int
    seconds: float
    ended: str
    validation_edges_in_test_graph: bool
    data: Origin
    world: dict[str, Any]


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of the run in a folder; None where it is not finished, or its result is damaged, which is said."""
    file = folder / RESULT
    try:
        result: dict[str, Any] = json.loads(file.read_text("utf-8"))
        Scored.model_validate(result)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        log.warning("%s is damaged: the run is scored again from its last checkpoint", file)
        return None
    return result


def is_of(result: dict[str, Any], folder: Path, config: Config, data_digest: str) -> bool:
    """Return whether a finished run is the one that a config describes on this data, wherever either lies."""
    try:
        earlier = load_yaml(folder / CONFIG).data
    except (NotFound, InvalidInput):
        return False
    return result["data"]["digest"] == data_digest and not list(_differing(earlier, config, MACHINE))


def _named(word: str, config: Config) -> tuple[Path, Checkpoint]:
    """Return the run folder and the checkpoint that --resume DIR means: a run's last one, or one step's."""
    if not word.strip():
        raise InvalidInput(Problem("--resume", "is auto, never, or a run folder or step folder", word))
    wanted = Path(word)
    if (wanted / STATE).is_file():
        checkpoint = read_checkpoint(wanted)
        source = Path(os.path.abspath(wanted)).parent.parent
        latest = Checkpoints(source, 1, 0).latest()
        if (
            _same(source, Path(config.output.dir))
            and latest is not None
            and latest.state["step"] > checkpoint.state["step"]
        ):
            message = f"is not the last checkpoint of {source}, step {latest.state['step']} is: name another output.dir"
            raise Conflict(Problem(str(wanted), message))
        return source, checkpoint
    if not wanted.is_dir():
        raise NotFound(Problem("--resume", "is auto, never, or a run folder or step folder", str(wanted)))
    found = Checkpoints(wanted, 1, 0).latest()
    if found is None:
        raise NotFound(Problem(str(wanted), f"holds no checkpoint in {FOLDER}/"))
    return wanted, found


def refuse_other(recorded: Recorded, config: Config, data_digest: str, source: Path) -> None:
    """Raise Conflict naming every field that makes the checkpoint another run's: its data, model or way of training."""
    there = f"the checkpoint in {source} has {{}}; name another output.dir, or train from nothing with --resume never"
    free = (*MACHINE, *LIMITS, "train.micro_batches")
    problems = [
        Problem(path, there.format(json.dumps(old)), new)
        for path, old, new in _differing(recorded.config, config, free)
    ]
    wanted = config.train.micro_batches
    if wanted is not None and wanted != recorded.micro_batches:
        problems.append(Problem("train.micro_batches", there.format(recorded.micro_batches), wanted))
    if recorded.data.digest != data_digest:
        stored = f"{recorded.data.name}, digest {recorded.data.digest[:12]}"
        problems.append(Problem("data digest", there.format(stored), data_digest[:12]))
    if problems:
        raise Conflict(problems)


def say_changes(recorded: Recorded, config: Config) -> list[str]:
    """Return a sentence for each limit that is another from here on."""
    return [
        f"{path} was {json.dumps(old)}, is {json.dumps(new)} from here on"
        for path, old, new in _differing(recorded.config, config, (*MACHINE, "train.micro_batches"))
    ]


def _differing(earlier: Any, config: Config, free: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, earlier value, value now) of every field that differs, but for those below the `free` paths."""

    def walk(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
        if path in free:
            return
        if isinstance(new, dict):
            for key, value in new.items():
                if isinstance(old, dict) and key in old:  # an older version did not know every field
                    yield from walk(old[key], value, f"{path}.{key}" if path else key)
        elif old != new:
            yield path, old, new

    return walk(earlier, config.model_dump(mode="json"), "")


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
