"""How much memory the ranks of a running job take, read from outside while they work."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KIB_PER_MIB = 1024


@dataclass(frozen=True)
class Footprint:
    """One process in MiB. pss: resident, pages that n processes map counted as 1/n, files' pages included.

    uss: pages that no other process maps; clean: those of them that are a file's as it is on disk, which the kernel drops
    at will. anonymous: its own memory that no file backs. dirty: all of it, and pages of files not written back yet.
    """

    pss: float
    uss: float
    clean: float
    anonymous: float
    dirty: float


def footprint(pid: int) -> Footprint | None:
    """Return what a process takes now, or None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    lines = [line.partition(":") for line in text.splitlines()[1:]]
    mib = {name: int(rest.split()[0]) / KIB_PER_MIB for name, _, rest in lines}
    clean = mib["Private_Clean"]
    dirty = mib["Private_Dirty"] + mib["Shared_Dirty"]
    return Footprint(mib["Pss"], clean + mib["Private_Dirty"], clean, mib["Anonymous"], dirty)


def ranks(launcher: int, module: str) -> list[int]:
    """Return the processes below `launcher` that run `python -m module ...`, whatever lies between."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue

    def below(pid: int) -> bool:
        while pid in parents and pid != launcher:
            pid = parents[pid]
        return pid == launcher

    return sorted(pid for pid in parents if below(pid) and _runs(pid, module))


def _runs(pid: int, module: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return Path(words[0]).name.startswith("python") and words[1:3] == ["-m", module]


class Watch:
    """Reads the ranks of a running job every few seconds, in a thread, from entering the context to leaving it.

    pss, uss: the largest sum of the ranks' PSS and the largest USS of one rank that were seen, in MiB.
    """

    def __init__(self, job: subprocess.Popen[bytes], module: str, every: float = 2.0) -> None:
        self._job, self._module, self._every = job, module, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.pss = self.uss = 0.0
        self.readings = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every) and self._job.poll() is None:
            seen = [footprint(pid) for pid in ranks(self._job.pid, self._module)]
            alive = [each for each in seen if each is not None]
            self.pss = max(self.pss, sum(each.pss for each in alive))
            self.uss = max([self.uss, *(each.uss for each in alive)])
            self.readings += bool(alive)


def horovodrun(python: str, size: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module on `size` ranks of this machine."""
    launcher = str(Path(python).with_name("horovodrun"))
    return [launcher, "--gloo", "-np", str(size), python, "-m", module, *arguments]
