"""A save that is killed, at any moment, loses no checkpoint."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.commands import ROOT

PROGRAM = "import sys; from tests.save_kills import run_all; print(*run_all(int(sys.argv[1]), int(sys.argv[2])))"


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_of_a_save_lose_nothing() -> None:
    # in a process of its own: what is forked must have no threads
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "100", "1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["100", "0"]
