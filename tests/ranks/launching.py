"""How the rank tests start real worlds: the commands a user types, with their time bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Launcher = Callable[[int, list[str]], list[str]]
BIN = Path(sys.executable).parent
BOUND = 200.0  # seconds; alone on two cores no world of these tests needs 20

# 2,000 papers: every epoch has a short last step (4 x 128 does not divide the edges), dropout is on
SETTINGS = {
    "data.source": "synthetic",
    "data.synthetic.nodes": 2000,
    "data.synthetic.features": 16,
    "data.negatives": 50,
    "model.hidden": 32,
    "model.out": 32,
    "model.layers": 2,
    "model.dropout": 0.5,
    "sampling.fanouts": "[4, 4]",
    "negatives.kind": "shared",
    "negatives.count": 64,
    "loss.kind": "softmax",
    "train.batch_size": 128,
    "train.micro_batches": 4,
    "train.threads": 1,
    "evaluate.valid_queries": 40,
    "evaluate.node_block": 256,
    "output.tensorboard": False,
}


def words(settings: dict[str, object]) -> list[str]:
    """Return settings as command-line overrides."""
    text = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return [word for key, value in text.items() for word in ("-s", f"{key}={value}")]


def trainer(*arguments: str) -> list[str]:
    """Return the trainer's command."""
    return [sys.executable, "-m", "horovod_trainer", *arguments]


def horovodrun(ranks: int, command: list[str]) -> list[str]:
    """Return the command that starts `ranks` ranks with Gloo."""
    return [str(BIN / "horovodrun"), "--gloo", "-np", str(ranks), *command]


def mpirun(ranks: int, command: list[str]) -> list[str]:
    """Return the command that starts `ranks` ranks with Open MPI."""
    # four ranks on two cores: one that waits must give its core to one that computes
    polite = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return ["mpirun", "--allow-run-as-root", *polite, "-np", str(ranks), *command]


def torchrun(ranks: int, command: list[str]) -> list[str]:
    """Return the command that starts `ranks` ranks with torchrun; the command must be Python's."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, "--no-python", *command]


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the project's root to its end, within the bound."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=BOUND, check=False)


def succeed(command: list[str], **environment: str) -> str:
    """Run a command that must succeed; return its standard output."""
    done = launch(command, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prepare(folder: Path) -> dict[str, object]:
    """Prepare the small graph; return the settings of runs on it."""
    settings: dict[str, object] = {**SETTINGS, "data.store": folder / "store"}
    succeed(trainer("prepare", *words(settings)))
    return settings


def rows(run: Path, event: str) -> list[dict[str, Any]]:
    """Return one event's rows of a run's metrics file."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]
