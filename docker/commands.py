"""Run a long command quietly: its output to a log file, a line of progress now and then, the log's end on failure."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horovod_trainer.errors import ExitCode, TrainerError

HEARTBEAT_SECONDS = 20.0
TAIL_LINES = 15


def say(text: str) -> None:
    """Print one line of progress at once (make and CI read through pipes)."""
    print(text, flush=True)


def exit_code(task: Callable[[], object]) -> int:
    """Run `task` and return the exit code it ends with; an error becomes lines on stderr."""
    try:
        task()
    except TrainerError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def run_logged(
    label: str,
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    progress: Callable[[str], str | None] = lambda line: None,
) -> None:
    """Run `argv`, appending its output to `log`; raise TrainerError with the log's end when it fails.

    `progress` turns a line of output into a line for the user or None; without any, a heartbeat shows it is alive.
    """
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"== {label}")
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(start, ended), daemon=True)
    tail: list[str] = []
    with log.open("a") as out:
        print(f"$ {' '.join(argv)}", file=out, flush=True)
        try:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        except OSError as error:
            raise TrainerError(f"{label}: {argv[0]} cannot be run: {error.strerror}") from error
        heart.start()
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            tail = [*tail[-TAIL_LINES + 1 :], line.rstrip()]
            if (news := progress(line)) is not None:
                say(f"   {news}")
        status = process.wait()
        ended.set()
    if status != 0:
        say("\n".join(f"   | {line}" for line in tail))
        raise TrainerError(f"{label} failed with exit status {status}; its whole output is in {log}")
    say(f"   done in {time.monotonic() - start:.0f} s")


def _beat(start: float, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_SECONDS):
        say(f"   ... {time.monotonic() - start:.0f} s")
