"""CSV to store at ogbl-citation2's size: `horovod_trainer prepare` against OGB's own class on the same files.

Ours counts from the start of the command to its end: digests of the raw files, the split, the symmetric graph, the
neighbour sums and the store's digests included. OGB's counts from calling its class to its return: the CSV becomes one
saved graph; what a user does next (a symmetric graph) is shown beside it. The files are in the page cache for both.

Memory is what a process has mapped that lies nowhere else, read every fifth of a second: anonymous, shared, and pages of
files that are not yet written back. The resident peak beside it counts clean pages of mapped files too, which the kernel
drops at will. Ours runs three times, before and after OGB's; the run with the
median of the seconds counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cache import ROOT, big_csv, folder, peers_python
from benchmarks.footprint import footprint
from benchmarks.harness import finish
from horovod_trainer import console

EVERY = 0.2  # seconds between readings
KIB_PER_GIB, MIB_PER_GIB = 2**20, 2**10
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Run:
    """A command that ended: its JSON answer, its seconds, (monotonic time, own GiB) readings, its resident peak."""

    answer: dict[str, Any]
    started: float
    ended: float
    readings: list[tuple[float, float]]
    resident_gib: float

    @property
    def seconds(self) -> float:
        """From the start of the process to its end."""
        return self.ended - self.started

    def own_gib(self, until: float = float("inf")) -> float:
        """Return the largest reading up to a moment."""
        return max((gib for when, gib in self.readings if when <= until), default=0.0)


def main() -> None:
    """Run ours, OGB's and ours twice more."""
    console.setup_logging(0)
    python, csv = peers_python(), big_csv()
    with tempfile.TemporaryDirectory(prefix="prepare.", dir=folder()) as scratch:
        warm(csv)
        runs = [prepared(csv, Path(scratch) / "store")]
        console.get_logger().info("OGB's own class (about ten minutes)")
        peer = ROOT / "benchmarks" / "peers" / "ogb_prepare.py"
        theirs = watched([python, peer, "--csv", csv, "--out", f"{scratch}/ogb"])
        shutil.rmtree(f"{scratch}/ogb")
        runs += [prepared(csv, Path(scratch) / "store") for _ in range(2)]
    ours = sorted(runs, key=lambda run: run.seconds)[1]
    same = [(key, ours.answer[key], theirs.answer[key]) for key in ("nodes", "edges", "graph_edges")]
    if wrong := [entry for entry in same if entry[1] != entry[2]]:
        sys.exit(f"not the same graph: {wrong}")
    result = summary(ours, theirs)

    def draw(axes: Any) -> None:
        for run, label in ((ours, "horovod_trainer prepare"), (theirs, "OGB, then symmetric")):
            axes.plot([when - run.started for when, _ in run.readings], [gib for _, gib in run.readings], label=label)
        axes.set_xlabel("seconds")
        axes.set_ylabel("dirty memory, GiB")
        axes.legend()

    finish(
        "prepare",
        result,
        title="CSV to store, citation2 size",
        columns=["stage", "seconds", "own GiB", "resident GiB"],
        rows=rows(ours, theirs),
        details={"ours": ours.answer, "ogb": theirs.answer, "seconds_of_ours": [run.seconds for run in runs]},
        draw=draw,
    )


def prepared(csv: Path, store: Path) -> Run:
    """Run ours into a fresh folder, which goes afterwards: the disk's cache is as large for the next one."""
    console.get_logger().info("ours (some minutes)")
    run = watched([sys.executable, "-m", "benchmarks.ours_prepare", csv, store])
    shutil.rmtree(store)
    return run


def summary(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the bars: ours whole over OGB's processing alone, without what follows it."""
    processed = theirs.answer["processed_at"]
    return {
        "time_ratio_vs_ogb": round(ours.seconds / theirs.answer["seconds"]["process"], 3),
        "memory_ratio_vs_ogb": round(ours.own_gib() / theirs.own_gib(processed), 3),
        "resident_ratio_vs_ogb": round(ours.resident_gib / theirs.answer["process_peak_gib"], 3),
        "seconds": round(ours.seconds, 1),
        "own_gib": round(ours.own_gib(), 2),
        "seconds_ogb": round(theirs.answer["seconds"]["process"], 1),
        "own_gib_ogb": round(theirs.own_gib(processed), 2),
    }


def rows(ours: Run, theirs: Run) -> list[list[Any]]:
    """Return the table: our stages, the whole, and OGB's two."""
    table: list[list[Any]] = [
        [f"ours: {stage}", seconds, None, None] for stage, seconds in ours.answer["seconds"].items()
    ]
    table.append(["ours, whole command", ours.seconds, ours.own_gib(), ours.resident_gib])
    theirs_at, seconds = theirs.answer["processed_at"], theirs.answer["seconds"]
    table.append(["OGB: process", seconds["process"], theirs.own_gib(theirs_at), theirs.answer["process_peak_gib"]])
    table.append(["then: symmetric", seconds["symmetric"], theirs.own_gib(), theirs.resident_gib])
    return table


def warm(root: Path) -> None:
    """Read every file once, so that the page cache is as good for the first run as for the second."""
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            while stream.read(_BLOCK):
                pass


def watched(command: Sequence[str | Path]) -> Run:
    """Run a command to its end while its memory is read; a failure ends the benchmark."""
    argv = [str(part) for part in command]
    started = time.monotonic()
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        readings: list[tuple[float, float]] = []
        ended = threading.Event()
        thread = threading.Thread(target=_read, args=(job.pid, ended, readings), name="watch", daemon=True)
        thread.start()
        text = job.stdout.read()
        _, status, usage = os.wait4(job.pid, 0)  # ru_maxrss of this very child
        job.returncode = os.waitstatus_to_exitcode(status)
        stopped = time.monotonic()
        ended.set()
        thread.join()
    if job.returncode or not text:
        sys.stderr.write(text[-2000:])
        sys.exit(f"{' '.join(argv)}: exit code {job.returncode}")
    answer = json.loads(text.splitlines()[-1])
    return Run(answer, started, stopped, readings, usage.ru_maxrss / KIB_PER_GIB)


def _read(pid: int, ended: threading.Event, readings: list[tuple[float, float]]) -> None:
    while not ended.wait(EVERY):
        if (gib := own_gib(pid)) is not None:
            readings.append((time.monotonic(), gib))


def own_gib(pid: int) -> float | None:
    """Return the dirty memory that a process maps, all anonymous memory included, or None when it has ended."""
    found = footprint(pid)
    return None if found is None else found.dirty / MIB_PER_GIB


if __name__ == "__main__":
    main()
