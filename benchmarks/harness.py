"""What every benchmark does alike: run pinned children, pair runs, print a table, draw a plot, end with one JSON line."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cache import ROOT
from horovod_trainer import console
from horovod_trainer.cores import usable_cores
from horovod_trainer.documents import make_folder, write_atomic

OUT = Path("runs") / "bench"


def machine() -> dict[str, Any]:
    """Return what the figures depend on besides the code: processor, cores, memory, versions, commit."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu,
        "vector": next((name for name in ("amx_bf16", "avx512f", "avx2") if name in flags), "none"),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": head.stdout.strip() or "unknown",
        **{name: version(name) for name in ("torch", "torch-geometric", "numpy", "numba", "ogb")},
    }


def _lines(file: str) -> list[str]:
    return Path(file).read_text(errors="replace").splitlines()


def end_on_terminate() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does: jobs that a benchmark has started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def child(
    command: Sequence[str | Path], *, cores: Sequence[int] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command, on these cores alone when given; return the JSON object in its last line on stdout.

    Its stderr passes through. A failure, or a last line that is no JSON object, ends the benchmark.
    """
    argv = [str(part) for part in command]
    if cores is not None:
        argv = ["taskset", "-c", ",".join(map(str, cores)), *argv]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}")
        answer = json.loads(done.stdout.splitlines()[-1])
        if not isinstance(answer, dict):
            raise ValueError("its last line is not a JSON object")
    except (ValueError, IndexError) as failure:
        sys.stderr.write(done.stdout[-2000:])
        sys.exit(f"{' '.join(argv)}: {failure}")
    return answer


def paired(runs: int, sides: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return `runs` answers of every side, taken in turns, so that a slow minute of the machine hits all alike."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(runs):
        for name, run in sides.items():
            console.get_logger().info("run %d of %d: %s", turn + 1, runs, name)
            answers[name].append(run())
    return answers


def median(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of one figure over runs."""
    return float(statistics.median(answer[key] for answer in answers))


def finish(
    name: str,
    summary: Mapping[str, Any],
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    details: Mapping[str, Any],
    draw: Callable[[Any], None],
) -> None:
    """Print table and machine, keep everything in runs/bench/NAME/{result.json,plot.png}, print the summary last.

    draw: fills one matplotlib Axes. details: whatever else a reader of result.json may want, the single runs first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = ROOT / OUT / name
    make_folder(folder)
    console.table(title, list(columns), [[_cell(value) for value in row] for row in rows])
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    draw(axes)
    axes.set_title(title)
    figure.savefig(folder / "plot.png", dpi=120)
    pyplot.close(figure)
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    about = machine()
    document = {"summary": dict(summary), "machine": about, "table": table, "details": dict(details)}
    write_atomic(folder / "result.json", json.dumps(document, indent=1) + "\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"every run: {OUT / name / 'result.json'}, plot: {OUT / name / 'plot.png'}\n")
    print(json.dumps(dict(summary)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
