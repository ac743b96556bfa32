"""Worlds that must not train: each refused with its exit code and its own sentence, within the bound, never a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_trainer.errors import ExitCode
from tests.ranks import launching
from tests.ranks.launching import horovodrun, launch, mpirun, trainer, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAILING_RANK = Path(__file__).with_name("failing_rank.py")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return launching.prepare(tmp_path_factory.mktemp("graph"))


def said(text: str, sentence: str) -> int:
    return sum(sentence in line for line in text.splitlines())


def test_fewer_ranks_and_hosts_than_promised(settings: dict[str, object], tmp_path: Path) -> None:
    promise = {"launch.expected_size": 8, "launch.expected_hosts": 4, "output.dir": tmp_path / "run"}
    done = launch(mpirun(2, trainer("train", *words({**settings, **promise}))))
    assert done.returncode == ExitCode.PLACEMENT, done.stderr
    assert said(done.stderr, "the launcher promised 8 ranks, the world has 2") == 1
    assert said(done.stderr, "the launcher promised 4 distinct hosts, ranks run on 1") == 1
    assert "Traceback" not in done.stderr


def test_ranks_that_each_train_alone(settings: dict[str, object], tmp_path: Path) -> None:
    alone = {"train.communicator": "solo", "output.dir": tmp_path / "run"}
    done = launch(mpirun(2, trainer("train", *words({**settings, **alone}))))
    assert done.returncode == ExitCode.PLACEMENT
    assert "says this is one of 2 ranks" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_finite_stops_all_ranks(settings: dict[str, object], tmp_path: Path) -> None:
    wild = {"optim.lr": 1e38, "output.dir": tmp_path / "run", "train.epochs": 1}
    done = launch(mpirun(2, trainer("train", *words({**settings, **wild}))))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    assert said(done.stderr, "is not finite on at least one rank") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("launcher", [horovodrun, mpirun])
def test_one_rank_that_fails_takes_the_others_down_and_speaks_first(
    launcher: launching.Launcher, settings: dict[str, object], tmp_path: Path
) -> None:
    command = [trainer()[0], str(FAILING_RANK), "train", *words({**settings, "output.dir": tmp_path / "run"})]
    done = launch(launcher(2, command))
    assert done.returncode != 0
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "error:" in line]
    assert "the disk of rank 1 is gone" in lines[0]


def test_ranks_with_different_configs_do_not_start(settings: dict[str, object], tmp_path: Path) -> None:
    command = [trainer()[0], str(FAILING_RANK), "train", *words({**settings, "output.dir": tmp_path / "run"})]
    done = launch(mpirun(2, command), FAULT="seed")
    assert done.returncode == ExitCode.CONFLICT, done.stderr
    assert said(done.stderr, "config: the ranks do not agree") == 1
