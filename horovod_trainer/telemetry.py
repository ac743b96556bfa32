"""What a run measured: metrics.jsonl (the truth), TensorBoard scalars, and where a step's time went (L3)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from horovod_trainer.console import get_logger
from horovod_trainer.documents import dump_yaml, make_folder
from horovod_trainer.errors import InvalidInput, NotFound, Problem, naming

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

log = get_logger()


class Telemetry:
    """The metrics of one run, written by rank 0 alone; on other ranks every method does nothing.

    Each line of run_dir/metrics.jsonl is one JSON object with event, step, epoch, time (seconds since 1970) and the
    event's own fields; the first is the event `run` with the configuration. Whatever is not finite becomes null.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        config_data: Mapping[str, Any],
        tensorboard: bool,
        keep: tuple[int, int] | None = None,
    ) -> None:
        """Begin a metrics file in run_dir, or go on with the one there; raises OSError when it cannot be written.

        keep: (bytes, step) that a checkpoint recorded: what was written after it is cut off, and will be written again.
        """
        self._file = None
        self._writer: Any = None
        if rank != 0:
            return
        make_folder(run_dir)
        self._path = run_dir / METRICS_FILE
        with naming(self._path):
            self._file = self._path.open("ab", buffering=0)  # one write per line: a reader sees whole lines
            kept, step = keep or (0, 0)
            there = os.fstat(self._file.fileno()).st_size
            if there < kept:
                log.warning("%s lacks its last lines: the run goes on, its curve has a gap", self._path)
                kept = _whole_lines(self._path)
            if there > kept:
                self._file.truncate(kept)
        if tensorboard:
            from tensorboardX import SummaryWriter  # 0.3 s, and only rank 0 writes

            purge = {"purge_step": step + 1} if keep else {}
            self._writer = SummaryWriter(logdir=str(run_dir / TENSORBOARD_FOLDER), flush_secs=10, **purge)
            indented = "\n".join("    " + line for line in dump_yaml(dict(config_data)).splitlines())
            self._writer.add_text("config", indented)  # an indented block of Markdown keeps its lines
        if keep is None:
            self.log("run", 0, 0, config=config_data)

    def log(self, event: str, step: int, epoch: int, **fields: object) -> None:
        """Write one line, and every number in it as the scalar event/field at `step`; raises OSError."""
        if self._file is None:
            return
        row = {"event": event, "step": step, "epoch": epoch, "time": round(time.time(), 3), **_finite(fields)}
        line = memoryview((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
        with naming(self._path):
            while line:  # a disk that fills up takes the first part of a line, and complains at the second
                line = line[self._file.write(line) :]
        if self._writer is not None and event != "run":
            for name, value in _scalars(event, fields):
                self._writer.add_scalar(name, value, step)

    def commit(self) -> int:
        """Bring the metrics to disk and return the file's length in bytes: what a checkpoint refers to."""
        if self._file is None:
            return 0
        with naming(self._path):
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Flush and close the files; calling again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class PhaseTimers:
    """Where the time of a step goes: named phases, and `other` for the rest; together they are the step time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step: dict[str, float] = {}  # phases of the step in progress
        self._phases: dict[str, float] = {}  # phases of the steps done since the last snapshot
        self._total = 0.0
        self._open: str | None = None
        self.latest = ""  # the phase in progress, or the last one
        self._began = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside `with` to a phase; phases do not nest (raises RuntimeError)."""
        if self._open is not None:
            raise RuntimeError(f"phase {name} inside phase {self._open} would be counted twice")
        self._open, self.latest, began = name, name, self._clock()
        try:
            yield
        finally:
            self._step[name] = self._step.get(name, 0.0) + self._clock() - began
            self._open = None

    def step_done(self) -> None:
        """End a step: everything since the previous end, or since the last snapshot, was part of it."""
        now = self._clock()
        self._total += now - self._began
        self._began = now
        for name, seconds in self._step.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._step.clear()

    def snapshot_and_reset(self) -> dict[str, float]:
        """Return seconds per phase, and other, of the steps done since the last call; the next step starts now."""
        phases = self._phases | {"other": max(0.0, self._total - sum(self._phases.values()))}
        self._step, self._phases, self._total, self._began = {}, {}, 0.0, self._clock()
        return phases


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last line cut by a crash is left out.

    Raises NotFound without the file and InvalidInput, with the line, where a line in the middle is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise NotFound(Problem(str(path), "no such file")) from None
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is empty or cut
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InvalidInput(
                Problem("", "is not a line of metrics", line.decode(errors="replace"), f"{path}:{number}")
            )
        rows.append(row)
    return rows


def _whole_lines(path: Path) -> int:
    """Return the length in bytes of a file up to its last line end."""
    return path.read_bytes().rfind(b"\n") + 1


def _finite(value: Any) -> Any:
    """Return plain JSON values: numpy numbers as Python's, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"a metric is a number, text, list or mapping, not {type(value).__name__}")


def _scalars(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}/{name}", value)
        elif not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
            yield f"{prefix}/{name}", float(value)
