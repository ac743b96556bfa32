"""A job over several hosts under the front, and what happens to hosts: killed, cut off; used by tests and `make chaos`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts.bench import HostProcess, Hosts, mpirun_on
from tests.ranks.jobs import curve
from tests.ranks.launching import rows, trainer, words

WATCHDOG = 6.0
RANKS = r"python\S* -m horovod_trainer train"


def start(hosts: Hosts, settings: dict[str, object], out: Path, names: list[str] | None = None) -> HostProcess:
    """Start a job of one rank a host, by the front on the first of them; its output goes to a file beside the run."""
    train = trainer("train", *words({**settings, "output.dir": out}))
    # HOROVOD_TRAINER_MALLOC: the test looks for ranks by their command line, which a restart would hide for a moment
    launcher = mpirun_on(names or hosts.names, 1, train, ["HOROVOD_TRAINER_MALLOC=system"])
    command = trainer("launch", "--exit-dir", str(out.parent), "--job", out.name, "--", *launcher)
    log = out.with_name(f"{out.name}.log").open("w")
    with log:
        return hosts.start(0, command, stdout=log, stderr=log)


def said(out: Path) -> str:
    """Return what the job has printed."""
    return out.with_name(f"{out.name}.log").read_text()


def reached(out: Path) -> int:
    """Return the last step in the run's metrics file."""
    try:
        return max((row["step"] for row in rows(out, "step")), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def wait_until(there: Callable[[], bool], timeout: float, what: str) -> None:
    """Return as soon as something is so."""
    until = time.monotonic() + timeout
    while not there():
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)


def wait_for_end(front: HostProcess, timeout: float, out: Path) -> None:
    """Return when the job has ended; fails with what it printed when that takes longer."""
    wait_until(lambda: front.poll() is not None, timeout, f"the end of the job: {said(out)}")


def run_to_step(hosts: Hosts, settings: dict[str, object], out: Path, more: int) -> HostProcess:
    """Start a job and return it when it is `more` steps further than it was."""
    goal = reached(out) + more
    front = start(hosts, settings, out)
    wait_until(lambda: reached(out) >= goal or front.poll() is not None, 90, f"step {goal}")
    assert front.poll() is None, said(out)
    return front


def cut_links(settings: dict[str, object], folder: Path, cuts: int) -> dict[str, int]:
    """Cut the second host off at some step, see that both sides end in time, mend, and go on; return the counts."""
    settings = {**settings, "train.watchdog_s": WATCHDOG, "checkpoint.every_steps": 3, "train.epochs": 10_000}
    hangs, out = 0, folder / "cut"
    with Hosts(2) as hosts:
        for _ in range(cuts):
            front = run_to_step(hosts, settings, out, 8)
            hosts.cut(1)
            bound = time.monotonic() + WATCHDOG + 5.0
            try:
                wait_for_end(front, bound - time.monotonic(), out)
                wait_until(lambda: not hosts.pids(1, RANKS), bound - time.monotonic(), "the far rank's end")
            except AssertionError:
                hangs += 1
            hangs += front.returncode == 0
            hosts.mend(1)
        last = {**settings, "train.max_steps": reached(out) + 5}
        for place in (out, folder / "uncut"):
            wait_for_end(start(hosts, last, place), 120, place)
    same = curve(out) == curve(folder / "uncut") and (out / "result.json").is_file()
    return {"link_cuts": cuts, "hangs": hangs, "inexact_resumes": int(not same)}
