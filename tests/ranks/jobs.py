"""A job under the front, and what is done to it: asked to stop, its ranks killed; used by tests and by `make chaos`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from horovod_trainer.launchers import RANK_VARIABLES
from horovod_trainer.processes import JOB, Process, processes
from tests.ranks.launching import ROOT, Launcher, rows, trainer, words

WAIT = 120.0  # seconds for a job to come to a step: a start takes 5 to 15


@dataclass
class Job:
    """A training job started by the front; its output goes to a file beside its run folder."""

    launcher: Launcher
    ranks: int
    settings: dict[str, object]
    out: Path
    more: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=trainer)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The job's name: the same for every try in one folder, and nobody else's."""
        return str(self.out)

    def __enter__(self) -> Self:
        train = [*self.script, "train", *words({**self.settings, "output.dir": self.out}), *self.more]
        command = [*trainer("launch", "--job", self.name), "--", *self.launcher(self.ranks, train)]
        self.log = self.out.with_name(f"{self.out.name}.log")
        env = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with self.log.open("w") as file:
            self.front = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
        return self

    def __exit__(self, *failure: object) -> None:
        if self.front.poll() is None:
            for _ in range(2):  # the second time at once
                self.front.terminate()
                time.sleep(1.5)
            self.front.wait()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for_step(self, step: int) -> None:
        """Return once the metrics file has the step."""
        until = time.monotonic() + WAIT
        while self.reached() < step:
            assert self.front.poll() is None, self.text()
            assert time.monotonic() < until, self.text()
            time.sleep(0.02)

    def reached(self) -> int:
        try:
            return max((row["step"] for row in rows(self.out, "step")), default=0)
        except (FileNotFoundError, ValueError):  # not yet there, or being written
            return 0

    def rank_pids(self) -> dict[int, int]:
        """Return the process of every rank."""
        found = {}
        for process in self.processes():
            names = [name for name in RANK_VARIABLES if name in process.environment]
            program = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0]
            if names and program == sys.executable.encode():
                found[int(process.environment[names[0]])] = process.pid
        return found

    def processes(self) -> list[Process]:
        """Return the processes that this job, in whichever try, has or left on this machine."""
        return [process for process in processes() if process.environment.get(JOB) == self.name]

    def kill(self, rank: int) -> None:
        os.kill(self.rank_pids()[rank], signal.SIGKILL)

    def end(self, within: float) -> int:
        """Return the front's exit code; fails when it takes longer."""
        try:
            return self.front.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {within} s:\n{self.text()}") from None


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every step of a run."""
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows(run, "step")]


def kill_ranks(
    launcher: Launcher, ranks: int, settings: dict[str, object], folder: Path, kills: int, chance: random.Random
) -> dict[str, Any]:
    """Kill a random rank of a job at a random moment, go on, and again; return what was counted.

    Every end must come within 10 s with a code that is not 0 and no process left; at the end the curve must be that of
    the run that nobody touched, to the last bit.
    """
    settings = {**settings, "checkpoint.every_steps": 5, "train.epochs": 10_000}
    hangs, out = 0, folder / "killed"
    for _ in range(kills):
        with Job(launcher, ranks, settings, out) as job:
            job.wait_for_step(job.reached() + chance.randint(1, 25))
            time.sleep(chance.uniform(0.0, 0.2))
            job.kill(chance.randrange(ranks))
            try:
                hangs += job.end(within=10.0) == 0
            except AssertionError:
                hangs += 1
            hangs += len(job.processes())
    total = 20 + max(step for step, _, _ in curve(out))
    last = {**settings, "train.max_steps": total}
    for place in (out, folder / "whole"):
        with Job(launcher, ranks, last, place) as job:
            assert job.end(within=WAIT + total * 0.2) == 0, job.text()
    expected = curve(folder / "whole")
    inexact = sum(ours != theirs for ours, theirs in zip(curve(out), expected, strict=True))
    same = (out / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()
    return {"rank_kills": kills, "hangs": hangs, "inexact_resumes": int(inexact > 0 or not same), "steps": total}
