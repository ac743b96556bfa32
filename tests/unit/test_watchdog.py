"""The watchdog ends what hangs, says where, and leaves alone what works."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from horovod_trainer.errors import ExitCode
from tests.commands import ROOT

PREAMBLE = """
import ctypes, os, sys, threading, time
from horovod_trainer.watchdog import Watchdog
def farewell(sentence):
    print("farewell:", sentence, file=sys.stderr, flush=True)
def waits_for_a_rank_that_is_gone(seconds=60):
    time.sleep(seconds)
"""


def watched(body: str, seconds: float = 1.0) -> tuple[int, str, float]:
    """Run a body inside `with Watchdog(seconds) as dog`; return (exit code, stderr, seconds it took)."""
    program = f"{PREAMBLE}with Watchdog({seconds}, farewell) as dog:\n{textwrap.indent(textwrap.dedent(body), '    ')}"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_no_progress_ends_the_process_with_its_stacks_and_its_whereabouts() -> None:
    code, said, seconds = watched(
        """
        dog.describe = lambda: "in phase allreduce after step 41"
        threading.Thread(target=waits_for_a_rank_that_is_gone, name="sampler", daemon=True).start()
        waits_for_a_rank_that_is_gone()
        """
    )
    assert code == ExitCode.TIMEOUT
    assert "farewell: no progress for 1 s (train.watchdog_s), in phase allreduce after step 41" in said
    assert said.index("farewell") < said.index("waits_for_a_rank_that_is_gone")
    assert said.count("in waits_for_a_rank_that_is_gone") == 2  # both threads
    assert 1.0 < seconds < 6.0


def test_code_that_keeps_pythons_lock_is_ended_too() -> None:
    code, said, seconds = watched("ctypes.PyDLL(None).sleep(60)")
    assert code != 0
    assert "Timeout" in said
    assert 'File "<string>"' in said
    assert seconds < 1.0 + 5.0 + 2.0  # the bound, and Python's own start


def test_progress_keeps_it_quiet() -> None:
    code, said, _ = watched("for _ in range(15):\n    time.sleep(0.2)\n    dog.beat('stage', 1, 2)")
    assert (code, said) == (0, "")


@pytest.mark.slow
def test_a_named_long_phase_is_not_counted_and_what_follows_is() -> None:
    code, said, _ = watched("with dog.suspended():\n    time.sleep(5.5)")
    assert (code, said) == (0, "")
    code, _, seconds = watched("with dog.suspended():\n    time.sleep(2)\nwaits_for_a_rank_that_is_gone()")
    assert code == ExitCode.TIMEOUT
    assert seconds > 3.0


def test_reports_of_progress_are_beats_and_are_passed_on() -> None:
    code, said, _ = watched(
        """
        report = dog.counting(lambda *words: print(*words, file=sys.stderr))
        for number in range(6):
            time.sleep(0.5)
            report("scores", number, 6)
        """
    )
    assert (code, said.splitlines()[-1]) == (0, "scores 5 6")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 1.0])
def test_after_its_end_it_ends_nothing(seconds: float | None) -> None:
    program = PREAMBLE + f"with Watchdog({seconds}, farewell):\n    pass\nwaits_for_a_rank_that_is_gone(6)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
