"""Stopped and gone on with, on real ranks: the same curve to the last bit, or to 1e-4 on another number of ranks."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.ranks import launching
from tests.ranks.jobs import Job, curve
from tests.ranks.launching import horovodrun, launch, mpirun, succeed, trainer, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 45  # two and a half epochs; optimizer with decoupled weight decay, moving average, schedule: all state there is
MORE = {
    "train.max_steps": STEPS, "train.epochs": 3, "optim.kind": "adamw", "optim.weight_decay": 0.1, "optim.average": 0.95,
    "optim.schedule": "cosine", "optim.warmup_steps": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {**launching.prepare(tmp_path_factory.mktemp("graph")), **MORE}


def stop(launcher: launching.Launcher, ranks: int, settings: dict[str, object], out: Path, number: int) -> None:
    """Run until some steps are done, ask the front to stop, and see that it did so in good order."""
    with Job(launcher, ranks, settings, out) as job:
        job.wait_for_step(7)
        job.front.send_signal(number)
        assert job.end(within=20.0) == 75, job.text()
        last = job.text().splitlines()[-1]
        assert "stopped: rank 0 on" in last
        assert f"ended after step {job.reached()}, which is saved" in last
    assert not job.processes()


@pytest.mark.parametrize(
    ("launcher", "ranks", "number"), [(horovodrun, 2, signal.SIGTERM), (mpirun, 2, signal.SIGUSR1), (mpirun, 4, signal.SIGTERM)]
)  # fmt: skip
def test_a_stopped_world_goes_on_bit_for_bit(
    launcher: launching.Launcher, ranks: int, number: int, settings: dict[str, object], tmp_path: Path
) -> None:
    stop(launcher, ranks, settings, tmp_path / "run", number)
    assert len(curve(tmp_path / "run")) < STEPS
    for name in ("run", "whole"):
        succeed(launcher(ranks, trainer("train", *words({**settings, "output.dir": tmp_path / name}))))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "run")) == STEPS
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
    assert len(json.loads((tmp_path / "run" / "result.json").read_text())["resumed_at_steps"]) == 1


def test_another_number_of_ranks_goes_on_with_the_same_global_batch(
    settings: dict[str, object], tmp_path: Path
) -> None:
    settings = {**settings, "train.micro_batches": "null"}  # one per rank, so 2, wherever it goes on
    stop(horovodrun, 2, settings, tmp_path / "two", signal.SIGTERM)
    for name in ("four", "one"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
    command = {
        name: trainer("train", *words({**settings, "output.dir": tmp_path / name})) for name in ("one", "two", "four")
    }
    succeed(horovodrun(2, command["two"]))
    succeed(command["one"])
    succeed(mpirun(4, command["four"]))
    expected = [loss for _, loss, _ in curve(tmp_path / "two")]
    for name in ("one", "four"):
        assert [loss for _, loss, _ in curve(tmp_path / name)] == pytest.approx(expected, abs=1e-4)
        assert len(curve(tmp_path / name)) == STEPS


def test_a_cold_start_leaves_adamws_weights_and_a_resumed_one_its_state_alone(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """Horovod's broadcast_optimizer_state takes a step on a fresh AdamW; ours must not, cold or resumed."""
    script = [trainer()[0], str(Path(__file__).with_name("adamw_start.py"))]
    done = launch(mpirun(2, [*script, *words({**settings, "output.dir": tmp_path / "run"})]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cold start and resumed start are exact") == 2
