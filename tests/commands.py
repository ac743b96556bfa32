"""How tests run the command line, in this process or for real, and what they may expect of it."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from horovod_trainer import cli

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("prepare", "verify", "train", "eval", "config", "check")
SMALL = """
data: {source: synthetic, store: STORE, negatives: 2,
       synthetic: {nodes: 12, years: 3, references: 3.0, features: 4, topics: 2}}
model: {hidden: 8, out: 8}
negatives: {kind: shared, count: 4}
train: {epochs: 2, batch_size: 4, micro_batches: 1, threads: 1}
output: {dir: RUN}
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Return the error lines; anything else on stderr that is not a log line fails here."""
        assert "Traceback" not in self.err, self.err
        assert "Warning" not in self.err, self.err
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(*arguments: object) -> Ended:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["horovod_trainer", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert isinstance(ended.value.code, int)
    return Ended(int(ended.value.code), out.getvalue(), err.getvalue())


def start(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Start the real command."""
    command = [sys.executable, "-m", "horovod_trainer", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **more})


def refuse(code: int, *arguments: object, lines: int = 1) -> str:
    """Run what must be refused with `code`, `lines` error lines and nothing on stdout; return those lines."""
    ended = run(*arguments)
    assert (ended.code, len(ended.errors), ended.out) == (code, lines, ""), ended
    return "\n".join(ended.errors)
