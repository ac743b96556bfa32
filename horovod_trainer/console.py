"""What people and machines read on a console: log lines, errors, progress, tables (L1: rich, loaded when used)."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from horovod_trainer.errors import InvalidInput, Problem

if TYPE_CHECKING:
    import rich.progress

NAME = "horovod_trainer"
FORMAT_VARIABLE = "HOROVOD_TRAINER_LOG"
SECONDS_BETWEEN_LINES = 5.0
PIPE_WIDTH = 10_000  # rich would cut a table to 80 columns in a pipe, where grep and awk want whole rows


def get_logger() -> logging.Logger:
    """Return the product's logger; silent below WARNING until setup_logging has run."""
    return logging.getLogger(NAME)


def setup_logging(rank: int = 0, run: str = "") -> None:
    """Send log lines to stderr: INFO and above on rank 0, WARNING and above on others. Calling again replaces.

    HOROVOD_TRAINER_LOG is text, json or auto (JSON lines in a Kubernetes pod, text elsewhere: horovodrun's output is a
    pipe that a person reads). Raises InvalidInput for anything else.
    """
    wanted = os.environ.get(FORMAT_VARIABLE) or "auto"
    if wanted not in ("text", "json", "auto"):
        raise InvalidInput(Problem(FORMAT_VARIABLE, "is text, json or auto", wanted))
    as_json = wanted == "json" or (wanted == "auto" and "KUBERNETES_SERVICE_HOST" in os.environ)
    handler = _ToStderr()
    handler.setFormatter(_JsonLine(rank, run) if as_json else _TextLine(rank))
    logger = get_logger()
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def print_error(sentences: Iterable[object], stopped: bool = False) -> None:
    """Print one line per problem to stderr: `error: path: message (got X) [file:line]`; `stopped: ...` where none is wrong."""
    for sentence in sentences:
        print(f"{'stopped' if stopped else 'error'}: {sentence}", file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout; columns that hold only numbers are aligned right; never cut in a pipe."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=PIPE_WIDTH)
    shown = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, show_header=any(columns))
    for number, column in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in cells)
        shown.add_column(Text(column), justify="right" if cells and numeric else "left", overflow="fold")
    for row in cells:
        shown.add_row(*[Text(str(cell)) for cell in row])
    console.print(shown)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 rank`, `2 ranks`, `1,000 ranks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


class Progress:
    """A task's progress on stderr: a live bar on a terminal, otherwise a log line every few seconds; rank 0 only."""

    def __init__(self, description: str, total: int | None, lines: bool = True) -> None:
        self.lines = lines
        self.description, self.total, self.done = description, total, 0
        self._started = self._said = time.monotonic()
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        if get_logger().isEnabledFor(logging.INFO) and sys.stderr.isatty():
            self._bar = _live_bar()
            self._bar.start()
            self._bar.add_task(self.description, total=self.total, note="")
            atexit.register(self.close)  # a bar left open would leave the cursor hidden
        return self

    @property
    def live(self) -> bool:
        """Whether a bar is on the screen."""
        return self._bar is not None

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count n more units done; the note, if any, is shown beside them."""
        self.reach(self.done + n, note)

    def reach(self, done: int, note: str = "") -> None:
        """Set the units done so far; the note, if any, is shown beside them."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
        elif self.lines and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            get_logger().info("%s", self._line(note))

    def close(self) -> None:
        """Remove the live bar, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self.close)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, note: str) -> str:
        share = f" of {self.total:,} ({self.done / self.total:.0%})" if self.total else ""
        line = f"{self.description}: {self.done:,}{share}, {time.monotonic() - self._started:.0f} s"
        return f"{line}, {note}" if note else line


def progress(description: str, total: int | None, lines: bool = True) -> Progress:
    """Return a context manager to count `total` units (None: unknown) with; lines=False: silent where no bar can be."""
    return Progress(description, total, lines)


class _Stages:
    """Progress for code that reports (stage, done, total): a new bar whenever the stage changes, closed when done."""

    def __init__(self) -> None:
        self._stage: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stage is None or self._stage.description != stage or self._stage.total != total:
            if self._stage is not None:
                self._stage.close()
            self._stage = Progress(stage, total).__enter__()
        self._stage.reach(done)
        if done >= total:
            self._stage.close()
            self._stage = None


stage_progress = _Stages()


def _live_bar() -> rich.progress.Progress:
    from rich import progress as bars
    from rich.console import Console

    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=sys.stderr),
        transient=True,
    )


class _ToStderr(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: a live bar puts its own there to keep lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # a closed pipe or file: logging's own report, never an end to the run
            self.handleError(record)


class _TextLine(logging.Formatter):
    """`12:34:56 message`, with the rank where it is not 0 and the level from WARNING up."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        marks = [f"rank {self.rank}"] if self.rank else []
        marks += [record.levelname.lower()] if record.levelno >= logging.WARNING else []
        prefix = f"{datetime.fromtimestamp(record.created):%H:%M:%S} "
        return prefix + (f"{' '.join(marks)}: " if marks else "") + record.getMessage() + _trace(record)


class _JsonLine(logging.Formatter):
    """One JSON object per line: time (UTC), level, rank, run, message."""

    def __init__(self, rank: int, run: str) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {"rank": rank} | ({"run": run} if run else {})

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), **self.fields}
        return json.dumps(line | {"message": record.getMessage() + _trace(record)}, ensure_ascii=False)


def _trace(record: logging.LogRecord) -> str:
    return "\n" + logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
