"""Horovod, MPI and torch.distributed: each right by itself, and the same run by each, to 1e-4."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from horovod_trainer.errors import ExitCode
from tests.ranks import launching
from tests.ranks.jobs import Job, curve
from tests.ranks.launching import Launcher, horovodrun, launch, mpirun, succeed, torchrun, trainer, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COLLECTIVES = str(Path(__file__).with_name("collectives.py"))
FAILING_RANK = [sys.executable, str(Path(__file__).with_name("failing_rank.py"))]
STEPS = 30
ways = pytest.mark.parametrize(
    ("launcher", "kind", "name"),
    [(mpirun, "mpi", "mpi"), (torchrun, "auto", "torch"), (mpirun, "torch", "torch"), (horovodrun, "auto", "horovod")],
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    made = launching.prepare(tmp_path_factory.mktemp("graph"))
    return {**made, "train.max_steps": STEPS}


@pytest.fixture(scope="module")
def alone(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    succeed(trainer("train", *words({**settings, "output.dir": out})))
    return out


@ways
def test_every_collective_is_right(launcher: Launcher, kind: str, name: str) -> None:
    done = launch(launcher(2, [sys.executable, COLLECTIVES, kind]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{name}: all collectives are right") == 2


@ways
def test_the_loss_curve_is_that_of_one_rank_and_repeats_bit_for_bit(
    launcher: Launcher, kind: str, name: str, settings: dict[str, object], alone: Path, tmp_path: Path
) -> None:
    for run in ("a", "b"):
        own = {**settings, "train.communicator": kind, "output.dir": tmp_path / run}
        succeed(launcher(2, trainer("train", *words(own))))
    expected = [loss for _, loss, _ in curve(alone)]
    assert len(expected) == STEPS
    assert [loss for _, loss, _ in curve(tmp_path / "a")] == pytest.approx(expected, abs=1e-4)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    result, other = (json.loads((run / "result.json").read_text()) for run in (tmp_path / "a", alone))
    assert result["world"]["communicator"] == name
    assert result["test"] == pytest.approx(other["test"], abs=1e-3)


@pytest.mark.parametrize(("launcher", "kind"), [(torchrun, "torch"), (mpirun, "mpi")])
def test_a_stop_and_a_failure_are_reported_as_under_horovod(
    launcher: Launcher, kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    own = {**settings, "train.communicator": kind, "train.max_steps": 1000, "train.epochs": 1000}
    with Job(launcher, 2, own, tmp_path / "run") as job:
        job.wait_for_step(5)
        job.front.send_signal(signal.SIGTERM)
        assert job.end(within=20.0) == ExitCode.STOPPED, job.text()
    failing = Job(launcher, 2, own, tmp_path / "run2", script=FAILING_RANK, environment={"FAULT": "conflict"})
    with failing as job:
        assert job.end(within=60.0) == ExitCode.CONFLICT, job.text()
    assert job.text().splitlines()[-1].endswith("the disk of rank 1 is another's")
    assert not job.processes()


@pytest.mark.parametrize(("launcher", "kind"), [(torchrun, "torch"), (mpirun, "mpi"), (mpirun, "torch")])
def test_a_killed_rank_ends_the_job(launcher: Launcher, kind: str, settings: dict[str, object], tmp_path: Path) -> None:
    own = {**settings, "train.communicator": kind, "train.max_steps": 1000, "train.epochs": 1000}
    with Job(launcher, 2, own, tmp_path / "run") as job:
        job.wait_for_step(5)
        job.kill(1)
        assert job.end(within=10.0) not in (0, 75), job.text()
    assert not job.processes()


def test_torch_without_a_meeting_place_says_what_is_missing(settings: dict[str, object], tmp_path: Path) -> None:
    own = {**settings, "train.communicator": "torch", "output.dir": tmp_path / "run"}
    done = launch(horovodrun(2, trainer("train", *words(own))))
    assert "torch needs RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in done.stderr
    assert "start it by torchrun or mpirun" in done.stderr
