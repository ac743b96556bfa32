"""What goes wrong on one rank ends the job within its bound, with that rank's own sentence and code: never a hang."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

from horovod_trainer.errors import ExitCode
from tests.ranks import launching
from tests.ranks.jobs import Job, curve, kill_ranks
from tests.ranks.launching import Launcher, horovodrun, mpirun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAILING_RANK = [sys.executable, str(Path(__file__).with_name("failing_rank.py"))]
WATCHDOG = 6.0
both = pytest.mark.parametrize("launcher", [horovodrun, mpirun])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return launching.prepare(tmp_path_factory.mktemp("graph"))


def ended(launcher: Launcher, settings: dict[str, object], out: Path, fault: str) -> tuple[int, str]:
    """Run with a fault on rank 1; return the front's exit code and all that was said."""
    job = Job(launcher, 2, settings, out, script=FAILING_RANK, environment={"FAULT": fault})
    with job:
        code = job.end(within=120.0)
    assert not job.processes()
    return code, job.text()


@both
def test_the_failing_ranks_code_and_sentence_come_through(
    launcher: Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    code, said = ended(launcher, settings, tmp_path / "run", "conflict")
    assert code == ExitCode.CONFLICT
    errors = [line for line in said.splitlines() if "error: " in line and "mpirun" not in line]
    assert "the disk of rank 1 is another's" in errors[0]
    assert errors[-1].startswith("error: rank 1 on ")


@both
def test_a_bug_on_one_rank_is_named_and_shows_its_trace(
    launcher: Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    code, said = ended(launcher, settings, tmp_path / "run", "bug")
    assert code == ExitCode.FAILED
    assert said.splitlines()[-1].endswith("a bug: ZeroDivisionError: of rank 1")
    assert "in failing" in said


@both
def test_one_ranks_infinity_stops_all_at_the_same_step_and_nothing_of_it_is_kept(
    launcher: Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    settings = {**settings, "checkpoint.every_steps": 1}
    code, said = ended(launcher, settings, tmp_path / "run", "infinity")
    assert code == ExitCode.DIVERGED
    assert said.count("step 3: the ") == 2  # said by rank 0, and by the front
    assert "is not finite on at least one rank" in said.splitlines()[-1]
    assert [step for step, _, _ in curve(tmp_path / "run")] == [1, 2]
    assert all(folder.name < "step-00000003" for folder in (tmp_path / "run" / "checkpoints").glob("step-*"))


@both
def test_a_rank_that_hangs_ends_the_job_within_the_watchdogs_bound(
    launcher: Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    settings = {**settings, "train.watchdog_s": WATCHDOG}
    job = Job(launcher, 2, settings, tmp_path / "run", script=FAILING_RANK, environment={"FAULT": "hang"})
    with job:
        job.wait_for_step(2)
        hung = time.monotonic()
        assert job.end(within=WATCHDOG + 5.0) == ExitCode.TIMEOUT, job.text()
        assert time.monotonic() - hung > WATCHDOG - 1.0
    said = job.text()
    assert f"no progress for {WATCHDOG:g} s (train.watchdog_s), in phase " in said.splitlines()[-1]
    assert "after step 2" in said.splitlines()[-1]
    assert "wait_for_ever" in said  # rank 1's stack: it is the one whose last progress lies furthest back
    assert not job.processes()


@both
def test_a_killed_rank_ends_the_job_and_the_run_goes_on_exactly(
    launcher: Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    counted = kill_ranks(launcher, 2, settings, tmp_path, kills=2, chance=random.Random(4))
    assert (counted["hangs"], counted["inexact_resumes"]) == (0, 0), counted
