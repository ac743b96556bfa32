"""Training jobs that a benchmark starts, pauses and reads: several can be loaded at once and run in turns.

A paused job takes no time at all, its communication threads included, so jobs that take turns of a few seconds meet the
same minute of the machine, and what differs between them is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.cache import ROOT
from benchmarks.footprint import footprint, horovodrun

MODULE = "benchmarks.rank_steps"
EVERY = 3.0  # seconds between looks at a job's memory, which take 4 ms a rank off its cores
PATIENCE = 300.0  # seconds until every rank has loaded
LAST_WORDS = 20.0  # seconds for a launcher whose ranks are gone
GLOO_TIMEOUT = "900"  # seconds; a paused rank must not seem lost to Gloo when it goes on, after 30 s by default

Span = tuple[float, float]  # of the clock that all processes of a host share
Clock = NDArray[np.float64]  # [steps, 2]: when a rank's allreduce began and ended


class Job:
    """Ranks that train on cores of their own: one world of Horovod's, or (alone) as many independent processes."""

    def __init__(self, size: int, cores: Sequence[int], arguments: Sequence[str], *, alone: bool = False) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="horovod-trainer-bench-")
        self.out = Path(self._folder.name)
        self.pss = 0.0
        pinned = ["--out", str(self.out), "--cores", ",".join(map(str, cores)), *arguments]
        commands = [horovodrun(sys.executable, size, MODULE, pinned)]
        if alone:
            each = [sys.executable, "-m", MODULE, *pinned, "--size", str(size), "--alone"]
            commands = [[*each, str(rank)] for rank in range(size)]
        self._log = (self.out / "log").open("w+b")
        environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT, **os.environ}
        self._processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log)
            for command in commands
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the job as it is."""
        if any(process.poll() is None for process in self._processes):  # else its ranks' numbers may be others' by now
            self._signal(signal.SIGKILL)
        for process in self._processes:  # a launcher sees its ranks end, and cleans up behind them
            try:
                process.wait(LAST_WORDS)
            except subprocess.TimeoutExpired:  # none of them had loaded
                process.terminate()
                process.wait()
        self._log.close()
        self._folder.cleanup()

    def ready(self) -> list[dict[str, Any]]:
        """Return what the ranks say of themselves, once all have loaded; ends the benchmark when they do not."""
        deadline = time.monotonic() + PATIENCE
        while len(ranks := self._ranks()) < self.size:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self._give_up()
            time.sleep(0.05)
        return ranks

    def wait(self) -> dict[str, Any]:
        """Return the result, once the job has come to its end; until then keep the largest sum of PSS [MiB] seen."""
        while any(process.poll() is None for process in self._processes):
            seen = [footprint(rank["pid"]) for rank in self._ranks()]
            self.pss = max(self.pss, sum(each.pss for each in seen if each is not None))
            time.sleep(EVERY)
        if any(process.returncode for process in self._processes):
            self._give_up()
        result: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return result

    def pause(self) -> None:
        """Stop every rank where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let every rank go on."""
        self._signal(signal.SIGCONT)

    def warm(self, steps: int) -> None:
        """Return once every rank has taken that many steps: buffers have grown, kernels are compiled."""
        deadline = time.monotonic() + PATIENCE
        while min(len(clock) for clock in self.clocks()) < steps:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self._give_up()
            time.sleep(0.1)

    def clocks(self) -> list[Clock]:
        """Return each rank's clock so far."""
        files = [self.out / f"{rank}.clock" for rank in range(self.size)]
        clocks = [np.fromfile(file, np.float64) if file.exists() else np.empty(0) for file in files]
        return [clock[: len(clock) // 2 * 2].reshape(-1, 2) for clock in clocks]

    def _ranks(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.out.glob("[0-9]*.json"))]

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks():
            try:
                os.kill(int(rank["pid"]), number)
            except ProcessLookupError:  # has ended
                continue

    def _give_up(self) -> None:
        sys.exit(f"a measured job failed:\n{(self.out / 'log').read_text(errors='replace')[-4000:]}")


def take_turns(jobs: Sequence[Job], turns: int, seconds: float) -> list[list[Span]]:
    """Return [job][turn] of the times between which each job ran, and no other; the jobs are loaded and running.

    The order is reversed every other turn, so that a drift of the machine hits none more than others.
    """
    for job in jobs:
        job.pause()
    spans: list[list[Span]] = [[] for _ in jobs]
    for turn in range(turns):
        for number in range(len(jobs))[:: 1 if turn % 2 == 0 else -1]:
            began = time.monotonic()
            jobs[number].resume()
            time.sleep(seconds)
            jobs[number].pause()
            spans[number].append((began, time.monotonic()))
    return spans


def steps_within(clocks: Sequence[Clock], span: Span) -> NDArray[np.intp]:
    """Return the numbers of the steps that all ranks did within a span of time, but for the first, cut by the pause.

    Empty where the machine was too busy for two whole steps.
    """
    steps = min(len(clock) for clock in clocks)
    every = np.stack([clock[:steps] for clock in clocks])
    return np.flatnonzero(((every[:, :, 0] >= span[0]) & (every[:, :, 1] <= span[1])).all(0))[1:]


def step_seconds(clock: Clock, numbers: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the seconds of each of these steps, from the end of the allreduce before to the end of its own."""
    seconds: NDArray[np.float64] = clock[numbers, 1] - clock[numbers - 1, 1]
    return seconds


def exposed(clocks: Sequence[Clock], numbers: NDArray[np.intp]) -> dict[str, float]:
    """Return milliseconds of a step's allreduce on the mean rank: until the slowest began, and from then to the end."""
    began = np.stack([clock[numbers, 0] for clock in clocks])
    ended = np.stack([clock[numbers, 1] for clock in clocks])
    last = began.max(0)
    return {"waiting_ms": 1e3 * float((last - began).mean()), "transfer_ms": 1e3 * float((ended - last).mean())}
