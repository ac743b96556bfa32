"""Hosts that die or fall silent: the job ends within its bound, says so, and the next try goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod_trainer.processes import JOB, TRY
from tests.hosts.bench import Hosts, available
from tests.hosts.faults import RANKS, WATCHDOG, cut_links, reached, run_to_step, said, start, wait_for_end, wait_until
from tests.ranks import launching
from tests.ranks.jobs import curve

obstacle = available()
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(obstacle is not None, reason=str(obstacle)),
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return launching.prepare(tmp_path_factory.mktemp("graph"))


def test_a_host_that_is_killed_ends_the_job_within_ten_seconds(settings: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Hosts(2) as hosts:
        front = run_to_step(hosts, {**settings, "train.epochs": 1000}, out, 5)
        hosts.kill(1)
        wait_for_end(front, 10, out)
        assert front.returncode not in (0, 75)
        wait_until(lambda: not hosts.pids(0, RANKS), 1, "the end of the other rank")
    assert any(line.startswith("error: ") for line in said(out).splitlines()[-3:])


def test_a_link_that_is_cut_ends_both_sides_within_the_watchdogs_bound_and_the_run_goes_on_exactly(
    settings: dict[str, object], tmp_path: Path
) -> None:
    assert cut_links(settings, tmp_path, cuts=1) == {"link_cuts": 1, "hangs": 0, "inexact_resumes": 0}
    text = said(tmp_path / "cut")  # of the last try, which went well
    assert "going on after step" in text


def test_the_sentence_after_a_cut_names_the_phase_and_the_step(settings: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Hosts(2) as hosts:
        front = run_to_step(hosts, {**settings, "train.watchdog_s": WATCHDOG, "train.epochs": 1000}, out, 5)
        hosts.cut(1)
        wait_for_end(front, WATCHDOG + 5.0, out)
        assert front.returncode == 124
    last = said(out).splitlines()[-1]  # of whichever rank's watchdog came first: the note's folder is shared
    rank = 0 if "rank 0" in last else 1
    assert last.startswith(f"error: rank {rank} on host{rank}: no progress for 6 s (train.watchdog_s), in phase ")
    assert f"after step {reached(out)}" in last


def test_ranks_of_an_earlier_try_on_another_host_are_ended_before_the_next_starts(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """A launcher pod that was replaced: its ranks still wait on the workers, cut off from it, with a long watchdog."""
    out = tmp_path / "run"
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    with Hosts(2) as hosts:
        stale = hosts.start(1, ["python3", "-c", deaf], {**os.environ, JOB: "run", TRY: "an earlier one"})
        other = hosts.start(1, ["python3", "-c", deaf], {**os.environ, JOB: "another job", TRY: "its own"})
        hosts.wait_for(1, "SIG_IGN")
        front = start(hosts, {**settings, "train.max_steps": 5}, out)
        wait_for_end(front, 90, out)
        assert front.returncode == 0, said(out)
        assert stale.poll() is not None
        assert other.poll() is None
        other.kill()
    assert "an earlier try of this job left 1 process here: ending" in said(out)
    assert len(curve(out)) == 5
