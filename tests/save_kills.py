"""Kill a process that saves checkpoint after checkpoint, again and again, and count what was lost."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch

from horovod_trainer.checkpoint import Checkpoint, Checkpoints
from horovod_trainer.errors import TrainerError

SIZE = 50_000  # floats: large enough that a kill lands inside a write, small enough for many


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Return what belongs into the checkpoint of a step."""
    return {"weight": torch.full((SIZE,), float(step))}


def save_for_ever(run: Path, first: int, committed: int) -> None:
    """Save steps first, first + 1, ... and report each to the descriptor once `save` has returned."""
    store = Checkpoints(run, 2, 1)
    store.lock()
    for step in range(first, first + 1_000_000):
        store.save(
            Checkpoint({"step": step, "value": step % 7 / 7}, {"model": tensors(step), "optimizer": tensors(-step)})
        )
        os.write(committed, step.to_bytes(8, "little"))


def kill_while_saving(run: Path, first: int, seconds: float) -> int:
    """Start a process that saves, kill it after `seconds`, and return the last step that it reported as committed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(run, first, writer)
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reported = b""
    while chunk := os.read(reader, 1 << 16):
        reported += chunk
    os.close(reader)
    return int.from_bytes(reported[-8:], "little") if reported else first - 1


def run_all(kills: int, seed: int) -> tuple[int, int]:
    """Return (kills made, committed checkpoints that were lost, or came back other than they were committed)."""
    chance = random.Random(seed)
    lost, step = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for _ in range(kills):
            committed = kill_while_saving(run, step + 1, chance.uniform(0.002, 0.05))
            lost += not _is_there(run, committed)
            step = max(committed, step)
            found = Checkpoints(run, 2, 1).latest()
            step = max(step, int(found.state["step"]) if found is not None else 0)
    return kills, lost


def _is_there(run: Path, committed: int) -> bool:
    """Return whether the last checkpoint is the committed one or a later one, whole and its own."""
    try:
        found = Checkpoints(run, 2, 1).latest()
    except TrainerError:
        return False
    if found is None:
        return committed < 1
    step = int(found.state["step"])
    signs = {"model": 1, "optimizer": -1}
    whole = all(
        torch.equal(found.groups[name]["weight"], tensors(sign * step)["weight"]) for name, sign in signs.items()
    )
    return whole and step >= committed
