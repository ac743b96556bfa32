"""How long until something happens: import, --help, config, and the first optimizer step on 1 and on 2 ranks.

Medians of runs taken in turns. Warm: compiled kernels come from the cache. Cold: an empty cache, as in a new container.
What the imports before a step cost is taken apart by package (python -X importtime).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache import ROOT
from benchmarks.footprint import horovodrun
from benchmarks.harness import finish
from horovod_trainer import console
from horovod_trainer.telemetry import read_metrics

MODULE = "horovod_trainer"
QUICK, SLOW = 9, 5  # runs of what takes tenths of a second, of what takes seconds
SETTINGS = [
    "data.source=synthetic", "data.synthetic.nodes=3000", "data.negatives=50", "train.max_steps=1", "train.epochs=1",
    "train.threads=1", "output.tensorboard=false",
]  # fmt: skip
IMPORTS = f"import {MODULE}.train, {MODULE}.run, {MODULE}.comm.backends, horovod.torch"
PACKAGES = 6  # the most expensive ones are shown


def main() -> None:
    """Time everything, then take the imports apart."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    console.setup_logging(0)
    python = [sys.executable]
    quick = {
        "python -c pass": [*python, "-c", "pass"],
        "import horovod_trainer": [*python, "-c", f"import {MODULE}"],
        "--help": [*python, "-m", MODULE, "--help"],
        "config": [*python, "-m", MODULE, "config"],
    }
    runs: dict[str, list[float]] = {name: [] for name in quick}
    for turn in range(QUICK):
        for name, command in quick.items():
            seconds = timed(command)
            if turn > 0:  # the first one reads files into memory
                runs[name].append(seconds)
    with tempfile.TemporaryDirectory(prefix="horovod-trainer-bench-") as folder:
        runs |= first_steps(Path(folder))
        shares = by_package(import_times(IMPORTS))
    show({name: statistics.median(seconds) for name, seconds in runs.items()}, runs, shares)


def timed(command: Sequence[str]) -> float:
    """Return the seconds a command takes."""
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def first_steps(folder: Path) -> dict[str, list[float]]:
    """Return seconds from a command's start to the end of its first optimizer step, warm and cold, 1 and 2 ranks."""
    settings = [*SETTINGS, f"data.store={folder / 'store'}"]
    overrides = [word for item in settings for word in ("-s", item)]
    subprocess.run([sys.executable, "-m", MODULE, "prepare", *overrides], cwd=ROOT, stdout=sys.stderr, check=True)
    commands = {
        "first step": [sys.executable, "-m", MODULE, "train", "--resume", "never", *overrides],
        "first step, 2 ranks": horovodrun(sys.executable, 2, MODULE, ["train", "--resume", "never", *overrides]),
    }
    runs: dict[str, list[float]] = {}
    for number, (name, command) in enumerate(commands.items()):
        cache = {"NUMBA_CACHE_DIR": str(folder / f"kernels-{number}")}
        runs[f"{name}, cold"] = [first_step(command, folder / f"cold-{number}", cache)]
        runs[name] = []
    for turn in range(SLOW):
        for number, (name, command) in enumerate(commands.items()):
            runs[name].append(first_step(command, folder / f"warm-{number}-{turn}", {}))
    return runs


def first_step(command: Sequence[str], out: Path, environment: Mapping[str, str]) -> float:
    """Return the seconds from the command's start to the end of its first step; the run goes on to its end."""
    console.get_logger().info("%s", out.name)
    started = time.time()
    words = [*command, "-s", f"output.dir={out}"]
    env = {**os.environ, **environment}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    step = next(row for row in read_metrics(out / "metrics.jsonl") if row["event"] == "step")
    return float(step["time"]) - started


def import_times(code: str) -> str:
    """Return what python -X importtime says of this code."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr


def by_package(text: str) -> dict[str, float]:
    """Return milliseconds of every top-level package's own modules in -X importtime's output, most expensive first."""
    total: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdigit():
            package = fields[2].strip().partition(".")[0]
            total[package] = total.get(package, 0.0) + int(fields[0]) / 1000
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def show(medians: dict[str, float], runs: dict[str, list[float]], shares: dict[str, float]) -> None:
    """Print the imports, then the table; keep all."""
    most = list(shares.items())[:PACKAGES]
    whole = sum(shares.values())
    rows = [[name, round(spent), f"{spent / whole:.0%}"] for name, spent in most]
    console.table(f"Imports before a step: {whole:,.0f} ms", ["package", "own modules [ms]", "share"], rows)
    bare = medians["python -c pass"]
    summary: dict[str, Any] = {
        "import_ms": round(1e3 * (medians["import horovod_trainer"] - bare), 1),
        "help_ms": round(1e3 * medians["--help"]),
        "config_ms": round(1e3 * medians["config"]),
        "first_step_seconds": round(medians["first step"], 2),
        "first_step_seconds_2_ranks": round(medians["first step, 2 ranks"], 2),
        "first_step_seconds_cold": round(medians["first step, cold"], 1),
        "first_step_seconds_2_ranks_cold": round(medians["first step, 2 ranks, cold"], 1),
        "imports_before_step_seconds": round(whole / 1e3, 2),
        "imports_most_expensive": {name: round(spent) for name, spent in most},
    }

    def draw(axes: Any) -> None:
        axes.barh(list(medians), list(medians.values()))
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="seconds from the command's start")

    finish(
        "startup", summary, title="Start-up, medians", columns=["what", "seconds", "least", "most", "runs"],
        rows=[[name, medians[name], min(each), max(each), len(each)] for name, each in runs.items()],
        details={"runs": runs, "imports_ms": shares}, draw=draw,
    )  # fmt: skip


if __name__ == "__main__":
    main()
