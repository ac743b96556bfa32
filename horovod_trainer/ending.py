"""How a command ends: every failure as one line per mistake, its exit code, and the note that the front reads (L5)."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn

import typer

from horovod_trainer.errors import (
    CommunicationFailed,
    ExitCode,
    InvalidInput,
    NotFound,
    Problem,
    Stopped,
    TimedOut,
    TrainerError,
)
from horovod_trainer.exit_note import leave_note
from horovod_trainer.launchers import launcher_rank, under_launcher

FIRST_ERROR_SECONDS = 1.0  # a rank that fails because another did lets the other speak first


def end_with(failure: BaseException) -> NoReturn:
    """Report a failure and end the process with its code; a traceback means a bug of ours."""
    if isinstance(failure, SystemExit):  # typer's own way to take a reader that has left
        leave(failure.code if isinstance(failure.code, int) else ExitCode.FAILED)
    if isinstance(failure, KeyboardInterrupt | typer.Abort):
        leave(ExitCode.INTERRUPTED)
    if isinstance(failure, BrokenPipeError):  # the reader has left and wants to hear no more
        leave(ExitCode.FAILED)
    error = translate(failure)
    if error is not None:
        report(error)
        leave(error.exit_code)
    traceback.print_exception(failure)  # and leave at once, so that the other ranks do not wait for this one
    leave_note(ExitCode.FAILED, f"a bug: {' '.join(f'{type(failure).__name__}: {failure}'.split())}")
    leave(ExitCode.FAILED)


def translate(failure: BaseException) -> TrainerError | None:
    """Return a failure as one of our errors; None for what should not have happened."""
    if isinstance(failure, TrainerError):
        return failure
    if isinstance(failure, typer.TyperException):  # what was typed
        message = " ".join(failure.format_message().split())
        return InvalidInput(f"{message.rstrip('.')} (see --help)")
    if isinstance(failure, OSError):
        kind = NotFound if isinstance(failure, FileNotFoundError) else TrainerError
        return kind(Problem(str(failure.filename or "input or output"), failure.strerror or str(failure)))
    if ran_out_of_memory(failure):
        return TrainerError(f"out of memory: {' '.join(str(failure).split())}")
    return None


def ran_out_of_memory(failure: BaseException) -> bool:
    """Return whether this is numpy's, the CPU allocator's or CUDA's way to say so; torch raises RuntimeErrors."""
    return isinstance(failure, MemoryError) or (
        isinstance(failure, RuntimeError)
        and any(sign in str(failure) for sign in ("not enough memory", "can't allocate memory", "out of memory"))
    )


def report(error: TrainerError) -> None:
    """Print an error's problems, one line each, and leave the note; what all ranks share is rank 0's alone to say."""
    from horovod_trainer import console

    if error.agreed and launcher_rank() != 0:
        return
    if isinstance(error, CommunicationFailed):
        time.sleep(FIRST_ERROR_SECONDS)
    leave_note(error.exit_code, str(error))
    console.print_error(error.problems, stopped=isinstance(error, Stopped))


def farewell(sentence: str) -> None:
    """Report what the watchdog says before it ends the process."""
    leave_note(ExitCode.TIMEOUT, sentence)
    report(TimedOut(f"rank {launcher_rank()}: {sentence}"))  # its own note comes too late


def leave(code: int) -> NoReturn:
    """End the process; under a launcher at once, so that a failed rank takes the job down instead of waiting for it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the caller
            continue
        try:
            stream.flush()
        except OSError as failure:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # where what it still holds can go
            if code == ExitCode.OK and not isinstance(failure, BrokenPipeError):
                report(TrainerError(Problem(stream.name, failure.strerror or str(failure))))
            code = code or ExitCode.FAILED
    if code != ExitCode.OK and under_launcher():
        os._exit(code)
    sys.exit(code)
