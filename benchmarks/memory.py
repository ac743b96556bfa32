"""Memory of training at ogbl-citation2's size: 1, 2 and 4 ranks, fan-outs [15, 10] and [15, 10, 5], read while they train.

The jobs are `horovodrun ... -m horovod_trainer train`; once metrics.jsonl shows the step asked for, every rank's
smaps_rollup is read a few times and the job is ended. Four ranks on two cores: their speed says nothing.

USS is what only one process maps. A lonely rank is the only one that maps the store and the libraries' code, so what it has
touched of them is in its USS, though the kernel may drop it at will and a second rank would share it: `uss_mib_per_rank`
leaves the clean pages of files of one rank out, the table and `uss_mib_1_rank_with_files` have them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cache import BIG_CONFIG, ROOT, big_store, folder
from benchmarks.footprint import Footprint, footprint, horovodrun, ranks
from benchmarks.harness import end_on_terminate, finish
from horovod_trainer import console
from horovod_trainer.cores import usable_cores
from horovod_trainer.telemetry import read_metrics

MODULE = "horovod_trainer"
SMALL_NODES = 200_000
STEPS = 100  # before reading: a rank keeps what its largest micro-batch so far has needed
RUNS = [((15, 10), 1), ((15, 10), 2), ((15, 10), 4), ((15, 10, 5), 4)]  # fan-outs, ranks
KEYS = ("uss", "clean", "anonymous")
READINGS, PAUSE = 8, 0.4  # seconds between readings: they fall anywhere in a step, the largest counts
PATIENCE = 1500.0  # seconds to the step


def main() -> None:
    """Train every shape, then the first one on a small graph: what a rank needs more on the big one is store data."""
    console.setup_logging(0)
    store, small = big_store(), small_store()
    end_on_terminate()
    runs = [measure(store, fanouts, size) for fanouts, size in RUNS]
    shape, size = RUNS[1]
    reference = measure(small, shape, size, [f"data.synthetic.nodes={SMALL_NODES}"])
    growth = largest(runs[1], "anonymous") - largest(reference, "anonymous")
    more = (store_bytes(store) - store_bytes(small)) / 2**20
    four = {run["shape"]: round(total_pss(run) / 1024, 2) for run in runs if run["ranks"] == 4}
    summary = {
        "uss_mib_per_rank": round(max(private(run) for run in runs if run["shape"] == name_of(shape))),
        "pss_gib_4_ranks": max(four.values()),
        "pss_gib_4_ranks_by_fanouts": four,
        "uss_mib_1_rank_with_files": round(largest(runs[0], "uss")),
        "anonymous_growth_mib": round(growth),
        "anonymous_growth_share_of_store": round(growth / more, 4),
    }
    rows = [row(run) for run in runs]
    rows.append([f"{name_of(shape)}, {SMALL_NODES:,} nodes", *row(reference)[1:]])

    def draw(axes: Any) -> None:
        labels = [f"{run['shape']}\n{console.counted(run['ranks'], 'rank')}" for run in runs]
        axes.bar(labels, [private(run) for run in runs], label="private to a rank")
        axes.bar(labels, [largest(run, "anonymous") for run in runs], width=0.5, label="of it anonymous")
        axes.set_ylabel("MiB")
        axes.legend()

    finish(
        "memory", summary, title="Memory of training at citation2's size",
        columns=["fan-outs", "ranks", "steps", *(f"{key} [MiB]" for key in KEYS), "PSS of all [GiB]", "oversubscribed"],
        rows=rows, draw=draw,
        details={"runs": runs, "small": reference, "store_mib": store_bytes(store) / 2**20, "store_mib_more": more},
    )  # fmt: skip


def measure(store: Path, fanouts: Sequence[int], size: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train until STEPS steps are done, read every rank's memory some times, end the job; return the readings."""
    console.get_logger().info("%s of %s, %d steps", console.counted(size, "rank"), name_of(fanouts), STEPS)
    with tempfile.TemporaryDirectory() as out:
        settings = [
            f"data.store={store}", f"output.dir={out}/run", f"model.layers={len(fanouts)}",
            f"sampling.fanouts={list(fanouts)}", "train.device=cpu", "output.tensorboard=false", *overrides,
        ]  # fmt: skip
        arguments = ["train", "--resume", "never", "-c", str(BIG_CONFIG)]
        arguments += [word for setting in settings for word in ("-s", setting)]
        with open(Path(out) / "log", "w+b") as log:
            job = subprocess.Popen(
                horovodrun(sys.executable, size, MODULE, arguments), cwd=ROOT, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                seconds = wait_for_step(job, Path(out) / "run" / "metrics.jsonl", log)
                readings = [read(job.pid, size) for _ in range(READINGS)]
            finally:
                end(job)
    return {
        "shape": name_of(fanouts), "ranks": size, "steps": STEPS, "seconds": seconds,
        "readings": [[asdict(rank) for rank in reading] for reading in readings],
    }  # fmt: skip


def wait_for_step(job: subprocess.Popen[bytes], metrics: Path, log: Any) -> float:
    """Return the seconds until the job had taken that many steps; ends the benchmark when it does not get there."""
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE and job.poll() is None:
        if metrics.exists() and max((int(row["step"]) for row in read_metrics(metrics)), default=0) >= STEPS:
            return time.monotonic() - started
        time.sleep(0.2)
    log.seek(0)
    sys.exit(f"the job did not come to step {STEPS}:\n{log.read().decode(errors='replace')[-3000:]}")


def read(launcher: int, size: int) -> list[Footprint]:
    """Return every rank's memory, after a pause."""
    time.sleep(PAUSE)
    found = [footprint(pid) for pid in ranks(launcher, MODULE)]
    alive = [each for each in found if each is not None]
    if len(alive) != size:
        sys.exit(f"{len(alive)} of {size} ranks are there to be read")
    return alive


def end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks, which it starts in sessions of their own."""
    left = ranks(job.pid, MODULE)
    for pid in [job.pid, *left]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # gone by itself, or with another
            continue
    job.wait()


def small_store() -> Path:
    """Return a small graph like the big one, prepared in the cache: batches on it are as large, the store is not."""
    path = folder() / "store-small"
    if not (path / "manifest.json").exists():
        command = [sys.executable, "-m", MODULE, "prepare", "-c", str(BIG_CONFIG), "-s", f"data.store={path}"]
        subprocess.run([*command, "-s", f"data.synthetic.nodes={SMALL_NODES}"], cwd=ROOT, stdout=sys.stderr, check=True)
    return path


def store_bytes(store: Path) -> int:
    """Return the size of the arrays that training reads."""
    names = ("features", "neighbour_sum", "indptr", "indices", "year", "train_indptr", "train_source", "train_target")
    return sum((store / f"{name}.npy").stat().st_size for name in names)


def name_of(fanouts: Sequence[int]) -> str:
    """Return fan-outs as text."""
    return str(list(fanouts))


def largest(run: dict[str, Any], key: str) -> float:
    """Return the largest value of a rank in any reading, in MiB."""
    return max(float(rank[key]) for reading in run["readings"] for rank in reading)


def row(run: dict[str, Any]) -> list[Any]:
    """Return a run's line of the table."""
    oversubscribed = "yes" if run["ranks"] > usable_cores() else ""
    memory = [largest(run, key) for key in KEYS]
    return [run["shape"], run["ranks"], run["steps"], *memory, total_pss(run) / 1024, oversubscribed]


def private(run: dict[str, Any]) -> float:
    """Return the largest USS of a rank, in MiB; of a lonely rank without the files' clean pages."""
    lonely = run["ranks"] == 1
    return max(float(rank["uss"] - lonely * rank["clean"]) for reading in run["readings"] for rank in reading)


def total_pss(run: dict[str, Any]) -> float:
    """Return the largest sum of PSS over ranks in any reading, in MiB."""
    return max(sum(float(rank["pss"]) for rank in reading) for reading in run["readings"])


if __name__ == "__main__":
    main()
