"""The processes of this host, as /proc shows them: whose child they are, which try of a job, what they listen to (L0)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

JOB, TRY = "HOROVOD_TRAINER_JOB", "HOROVOD_TRAINER_TRY"
KILL_SECONDS = 2.0  # between asking and killing


@dataclass(frozen=True)
class Process:
    """One process of this user: parent, what it was started with, and the signals it has a handler for."""

    pid: int
    parent: int
    environment: Mapping[str, str]
    caught: int

    def catches(self, number: signal.Signals) -> bool:
        """Return whether the process handles the signal; one that does not would be ended by it."""
        return bool(self.caught >> (number - 1) & 1)


def processes(proc: Path = Path("/proc")) -> list[Process]:
    """Return the living processes whose environment this user may read, without this one."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError, KeyError, ValueError):  # ended meanwhile, or another user's
                found.append(_process(folder))
    return [process for process in found if process is not None]


def _process(folder: Path) -> Process | None:
    lines = (folder / "status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if status["State"][0] in "ZX":  # dead, and not yet waited for
        return None
    words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    return Process(int(folder.name), int(status["PPid"]), environment, int(status["SigCgt"], 16))


def descendants(root: int, found: Iterable[Process]) -> list[Process]:
    """Return the processes below `root`."""
    children: dict[int, list[Process]] = {}
    for process in found:
        children.setdefault(process.parent, []).append(process)
    below, queue = [], [root]
    while queue:
        more = children.pop(queue.pop(), [])
        below += more
        queue += [process.pid for process in more]
    return below


def of_try(job: str, attempt: str, found: Iterable[Process]) -> list[Process]:
    """Return the processes that one try of a job started here, wherever they hang in the tree."""
    return [p for p in found if (p.environment.get(JOB), p.environment.get(TRY)) == (job, attempt)]


def of_earlier_tries(job: str, attempt: str, found: Iterable[Process]) -> list[Process]:
    """Return the processes that other tries of the job left here."""
    return [p for p in found if p.environment.get(JOB) == job and p.environment.get(TRY) not in (None, attempt)]


def end(victims: Iterable[Process], grace: float = KILL_SECONDS) -> None:
    """End processes: SIGKILL to those that SIGTERM did not end within `grace` seconds (0: at once); returns when all are gone.

    A rank hears SIGTERM as the wish to stop, and may wait for others that will never come: hence the bound.
    """
    left = [process.pid for process in victims]
    for number, seconds in (((signal.SIGTERM, grace),) if grace else ()) + ((signal.SIGKILL, 10.0),):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + seconds
        while (left := [pid for pid in left if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether a process is there and not dead."""
    return stat(pid)[:1] not in ([], ["Z"], ["X"])


def stat(pid: int) -> list[str]:
    """Return a process's state and what follows it; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
