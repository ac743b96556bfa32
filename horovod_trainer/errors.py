"""Every error this product raises on purpose, and the exit code each kind ends with (L0: standard library only)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The exit codes of every command; docs/errors.md lists them for users."""

    OK = 0
    FAILED = 1
    INVALID = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNREACHABLE = 5
    PLACEMENT = 6
    DIVERGED = 7
    STOPPED = 75
    TIMEOUT = 124
    INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, what is wrong and what would be right, what was got, and the file and line it came from."""

    path: str
    message: str
    got: object = None
    source: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        if self.got is not None:
            text += f" (got {shorten(self.got)})"
        return f"{text} [{self.source}]" if self.source else text


def shorten(value: object, limit: int = 80) -> str:
    """Return repr(value) on one line, cut to `limit` characters."""
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError raised inside say which file it is about; reads and writes themselves do not know."""
    try:
        yield
    except OSError as failure:
        if failure.filename is None:
            failure.filename = os.fspath(path)
        raise


class TrainerError(Exception):
    """Base of the tree: carries one or more Problems; a command prints each as one line and exits with `exit_code`.

    agreed: all ranks raise this same error, so that rank 0 alone prints it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED

    def __init__(self, problems: str | Problem | Sequence[Problem], *, agreed: bool = False) -> None:
        self.agreed = agreed
        if isinstance(problems, str):
            problems = Problem("", problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InvalidInput(TrainerError):
    """Usage, config or data that cannot be accepted."""

    exit_code = ExitCode.INVALID


class NotFound(TrainerError):
    """A file, data set or object that should exist does not."""

    exit_code = ExitCode.NOT_FOUND


class Conflict(TrainerError):
    """Something that exists contradicts what was asked for."""

    exit_code = ExitCode.CONFLICT


class Unreachable(TrainerError):
    """A registry, server or API could not be reached, or refused."""

    exit_code = ExitCode.UNREACHABLE


class PlacementError(TrainerError):
    """World size or placement is not what the launcher promised."""

    exit_code = ExitCode.PLACEMENT


class Diverged(TrainerError):
    """A loss or gradient is not finite."""

    exit_code = ExitCode.DIVERGED


class CommunicationFailed(TrainerError):
    """A collective did not come to its end: another rank ended, or the network did."""


class Stopped(TrainerError):
    """The run was asked to stop and did so: the same command goes on from its checkpoint."""

    exit_code = ExitCode.STOPPED


class TimedOut(TrainerError):
    """Nothing went on for longer than it may."""

    exit_code = ExitCode.TIMEOUT


def of_exit_code(code: int) -> type[TrainerError]:
    """Return the kind of error that ends with an exit code; TrainerError for codes without a kind of their own."""
    kinds = [kind for kind in TrainerError.__subclasses__() if kind.exit_code == code]
    return kinds[0] if kinds and code != ExitCode.FAILED else TrainerError
