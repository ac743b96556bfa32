"""Where graphs come from: each source turns its raw files into a RawGraph, and fingerprints them first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from horovod_trainer.config import DataSection
from horovod_trainer.data.graph import RawGraph
from horovod_trainer.errors import InvalidInput, Problem

Progress = Callable[[str, int, int], None]  # stage, done, total


class Source(Protocol):
    """One kind of raw data: a module of this package."""

    def fingerprint(self, config: DataSection, progress: Progress) -> dict[str, str]:
        """Return file name -> SHA-256 of the raw files; {} without any. Raises NotFound."""

    def load(self, config: DataSection, progress: Progress) -> RawGraph:
        """Return the graph in the raw files, fetched first where config allows.

        Raises InvalidInput naming the file that is not what it should be, Unreachable where it cannot be fetched.
        """


def source_of(kind: str) -> Source:
    """Return the source of a kind; loaded late, since each brings its own libraries."""
    try:
        return cast(Source, importlib.import_module(f"{__name__}.{kind}"))
    except ModuleNotFoundError as failure:
        advice = "pip install 'horovod-trainer[data]'"
        raise InvalidInput(Problem("data.source", f"{kind} needs {failure.name}: {advice}", kind)) from None
