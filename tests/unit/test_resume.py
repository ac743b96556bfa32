"""Going on after an end: the very run that was never interrupted, or a refusal that names what is another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from horovod_trainer.data.batches import MicroBatch, Recipe
from horovod_trainer.stopping import StopWish
from horovod_trainer.telemetry import read_metrics
from horovod_trainer.train import Trainer
from tests.commands import Ended, refuse, run

pytestmark = pytest.mark.usefixtures("_threads_put_back")

Small = Callable[..., list[object]]
LONG = ("train.epochs=6", "optim.average=0.9", "model.dropout=0.3", "evaluate.valid_queries=null")


def curve(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    """Return the rows of an event without what a clock measured."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == event]
    return [
        {k: v for k, v in row.items() if k not in ("time", "seconds", "phases", "edges_per_second")} for row in rows
    ]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the next run be asked to stop while it takes a step."""
    real = Trainer._step

    def stepping(self: Trainer, *args: Any) -> dict[str, float]:
        self.stop.asked = self.stop.asked or self.progress.step + 1 == step
        return real(self, *args)

    monkeypatch.setattr(Trainer, "_step", stepping)


def interrupted(small: Small, monkeypatch: pytest.MonkeyPatch, step: int, *overrides: str) -> Ended:
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        ended = run(*small("train", *LONG, *overrides))
    assert ended.code == 75, ended
    assert f"ended after step {step}, which is saved" in ended.err
    return ended


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = [part for override in (*LONG, f"output.dir={folder}") for part in ("-s", override)]
    assert run("train", "-c", made / "small.yaml", *words).code == 0
    return folder


@pytest.mark.parametrize("step", [1, 6, 7, 8, 20, 41, 42])
def test_a_run_that_was_stopped_becomes_the_run_that_was_not(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """7 steps an epoch: the stops are within epochs, before and after a validation, and before the last scores."""
    assert len(curve(whole)) == 42
    interrupted(small, monkeypatch, step)
    folder = tmp_path / "run"
    assert not (folder / "result.json").exists()
    ended = run(*small("train", *LONG))
    assert ended.code == 0, ended
    for event in ("step", "valid", "test"):
        assert curve(folder, event) == curve(whole, event)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    result, other = (json.loads((f / "result.json").read_text()) for f in (folder, whole))
    assert result["resumed_at_steps"] == [step]
    assert [result[key] for key in ("test", "valid", "best_epoch", "steps")] == [
        other[key] for key in ("test", "valid", "best_epoch", "steps")
    ]


def test_many_stops_are_as_good_as_none(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 4, 7, 19, 40):
        interrupted(small, monkeypatch, step)
    assert run(*small("train", *LONG)).code == 0
    assert curve(tmp_path / "run") == curve(whole)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["resumed_at_steps"] == [3, 4, 7, 19, 40]


def test_what_was_logged_after_the_checkpoint_is_cut_off(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 11}\n{"event": "st')
    assert run(*small("train", *LONG)).code == 0
    assert curve(tmp_path / "run") == curve(whole)


def test_a_metrics_file_that_lost_lines_does_not_stop_the_run(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-400])
    ended = run(*small("train", *LONG))
    assert "its curve has a gap" in ended.err
    assert curve(tmp_path / "run")[-30:] == curve(whole)[-30:]


def test_every_seed_edge_is_seen_once_per_epoch_across_a_stop(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = len(np.load(tmp_path / "store" / "train_source.npy"))
    seen: list[tuple[int, NDArray[np.int32]]] = []
    build = Recipe.build

    def watching(self: Recipe, epoch: int, step: int, micro: int, *rest: Any) -> MicroBatch:
        batch = build(self, epoch, step, micro, *rest)
        seen.append((epoch, np.stack([batch.nodes[batch.source], batch.nodes[batch.target]], axis=1)))
        return batch

    monkeypatch.setattr(Recipe, "build", watching)
    more = ("train.prefetch=0", "train.epochs=2")
    interrupted(small, monkeypatch, 4, *more)
    assert run(*small("train", *LONG, *more)).code == 0
    for epoch in (0, 1):
        edges = np.concatenate([part for number, part in seen if number == epoch])
        assert len(np.unique(edges, axis=0)) == len(edges) == seeds


# what the wanted mode does


def test_a_finished_run_is_not_trained_again_unless_told_to(small: Small, tmp_path: Path) -> None:
    first = run(*small("train"))
    again = run(*small("train"))
    assert again.code == 0
    assert "is finished already" in again.err
    assert again.out == first.out
    assert run(*small("train"), "--resume", "never").code == 0
    assert (tmp_path / "run.1" / "result.json").is_file()
    assert run(*small("train", "optim.lr=0.01")).code == 0  # another run: the finished one steps aside
    assert (tmp_path / "run.2" / "result.json").is_file()
    machine = ("train.log_every=3", "launch.expected_hosts=1", "checkpoint.keep_last=9")
    assert "is finished already" in run(*small("train", "optim.lr=0.01", *machine)).err


def test_never_begins_anew_and_keeps_what_was_there(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    assert run(*small("train", *LONG), "--resume", "never").code == 0
    assert (tmp_path / "run.1" / "checkpoints" / "LATEST").is_file()
    assert curve(tmp_path / "run") == curve(whole)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["resumed_at_steps"] == []


def test_from_a_folder_a_new_run_branches_off(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 16)
    shutil.move(tmp_path / "run", tmp_path / "first")
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    earlier = next((tmp_path / "first" / "checkpoints").glob("step-00000014-*"))
    for number, source in enumerate((tmp_path / "first", earlier)):
        out = f"output.dir={tmp_path}/branch{number}"
        assert run(*small("train", *LONG, out), "--resume", source).code == 0
        assert curve(tmp_path / f"branch{number}") == curve(whole)
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_goes_on_when_it_is_named_and_has_further_to_go(
    small: Small, tmp_path: Path, whole: Path
) -> None:
    assert run(*small("train", *LONG, "train.epochs=3")).code == 0
    ended = run(*small("train", *LONG), "--resume", tmp_path / "run")
    assert ended.code == 0
    assert "train.epochs was 3, is 6 from here on" in ended.err
    assert curve(tmp_path / "run") == curve(whole)
    assert (tmp_path / "run" / "earlier-result.json").is_file()


def test_what_is_no_checkpoint_is_refused(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--resume: is auto, never, or" in refuse(3, *small("train"), "--resume", "sometimes")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refuse(3, *small("train"), "--resume", tmp_path / "empty")
    assert not (tmp_path / "run").exists()
    interrupted(small, monkeypatch, 16)
    earlier = next((tmp_path / "run" / "checkpoints").glob("step-00000014-*"))
    said = refuse(4, *small("train", *LONG), "--resume", earlier)
    assert "is not the last checkpoint" in said


# what is another run's


def test_another_model_or_way_of_training_is_refused_by_field(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    before = sorted(tmp_path.rglob("*"))
    other = (
        "model.hidden=4",
        "optim.lr=0.5",
        "train.seed=3",
        "train.batch_size=5",
        "train.micro_batches=2",
        "loss.kind=margin",
    )
    said = refuse(4, *small("train", *LONG, *other), lines=6)
    for path in (word.partition("=")[0] for word in other):
        assert f"error: {path}: the checkpoint in {tmp_path}/run has " in said
    assert "(got 0.5)" in said
    assert "--resume never" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_another_graph_is_refused_by_its_digest(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(small, monkeypatch, 10)
    other = [*LONG, f"data.store={tmp_path}/other", "data.synthetic.seed=9"]
    assert run(*small("prepare", *other)).code == 0
    assert "data digest: the checkpoint in" in refuse(4, *small("train", *other))


def test_limits_and_the_machine_may_be_others(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(small, monkeypatch, 10)
    ended = run(*small("train", *LONG, "train.max_steps=12", "train.log_every=1", "checkpoint.keep_last=1"))
    assert ended.code == 0
    assert "train.max_steps was null, is 12 from here on" in ended.err
    assert "log_every" not in ended.err
    assert len(curve(tmp_path / "run")) == 12


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 16)
    folder = tmp_path / "run" / "checkpoints"
    for damaged in folder.glob("step-00000016-*/model.safetensors"):
        damaged.write_bytes(b"")
    ended = run(*small("train", *LONG))
    assert "going on after step 14" in ended.err
    assert curve(tmp_path / "run") == curve(whole)
    assert "model.safetensors: is damaged" in ended.err


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    for state in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        state.write_text("{")
    assert "is damaged" in refuse(2, *small("train", *LONG), lines=2)


# stopping and saving


def test_a_wish_before_the_first_step_ends_at_once(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    monkeypatch.setattr(StopWish, "heed", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    ended = run(*small("train", *LONG))
    assert ended.code == 75
    assert "asked to stop (SIGTERM) before the first step" in ended.err


def test_a_disk_that_takes_no_checkpoint_ends_the_run_with_the_last_one_intact(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 8)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("horovod_trainer.checkpoint._write", full)
        ended = run(*small("train", *LONG))
    assert ended.code == 1
    assert "step 14 could not be written: No space left on device; step 8's is intact" in ended.errors[0]
    assert run(*small("train", *LONG)).code == 0
    assert curve(tmp_path / "run") == curve(whole)


def test_checkpoints_are_saved_every_so_many_steps_and_minutes(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(*overrides: str) -> list[int]:
        assert run(*small("train", "checkpoint.keep_last=100", *overrides), "--resume", "never").code == 0
        return sorted(int(f.name.split("-")[1]) for f in (tmp_path / "run" / "checkpoints").glob("step-*"))

    assert saved() == [7, 14]
    assert saved("checkpoint.every_steps=3") == [3, 6, 7, 9, 12, 14]
    assert saved("checkpoint.every_minutes=1e-9") == [*range(1, 8), *range(7, 15), 14]


def test_hours_of_training_are_counted_over_all_tries(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 10)
    ended = run(*small("train", *LONG, "train.max_hours=1e-9"))
    assert ended.code == 0
    assert "ended: train.max_hours = 1e-09 reached" in ended.out
    assert len(curve(tmp_path / "run")) == 10


def test_one_run_at_a_time_writes_to_a_folder(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_trainer.checkpoint import Checkpoints

    interrupted(small, monkeypatch, 10)
    other = Checkpoints(tmp_path / "run", 1, 0)
    other.lock()
    assert "a run is writing there" in refuse(4, *small("train", *LONG))
    assert "a run is writing there" in refuse(4, *small("train", *LONG), "--resume", "never")
    other.unlock()
    assert run(*small("train", *LONG)).code == 0


# starts that die early, results that are not what they were


@pytest.mark.parametrize("window", ["write_atomic", "Telemetry"])
@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_start_that_died_leaves_a_folder_that_the_next_one_takes(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, window: str, mode: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"horovod_trainer.run.{window}", full)
        assert run(*small("train", *LONG)).code == 1
    assert run(*small("train", *LONG), "--resume", mode).code == 0
    assert curve(tmp_path / "run") == curve(whole)


def test_a_branch_is_its_own_run_from_its_first_moment(
    small: Small, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(small, monkeypatch, 16)
    branch = small("train", *LONG, f"output.dir={tmp_path}/branch")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", lambda *_: 1 / 0)
        assert run(*branch, "--resume", tmp_path / "run").code == 1
    ended = run(*branch)
    assert "going on after step 16" in ended.err
    assert curve(tmp_path / "branch") == curve(whole)


def test_a_finished_run_of_other_data_is_another_run(small: Small, tmp_path: Path) -> None:
    assert run(*small("train")).code == 0
    shutil.copytree(tmp_path / "store", tmp_path / "elsewhere")
    assert "is finished already" in run(*small("train", f"data.store={tmp_path}/elsewhere")).err
    shutil.rmtree(tmp_path / "store")
    other = ("data.synthetic.seed=5",)
    assert run(*small("prepare", *other)).code == 0
    ended = run(*small("train", *other))
    assert ended.code == 0
    assert "finished already" not in ended.err
    assert (tmp_path / "run.1" / "result.json").is_file()


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"valid": null, "test": null}', "\ufffd"])
def test_a_damaged_result_is_scored_again_from_the_last_checkpoint(small: Small, tmp_path: Path, content: str) -> None:
    first = run(*small("train"))
    file = tmp_path / "run" / "result.json"
    good = json.loads(file.read_text())
    file.write_text(content)
    ended = run(*small("train"))
    assert ended.code == 0, ended
    assert "result.json is damaged: the run is scored again" in ended.err
    assert json.loads(file.read_text())["test"] == good["test"]
    assert not (tmp_path / "run.1").exists()
    assert ended.out.splitlines()[-1] == first.out.splitlines()[-1]


def test_a_damaged_checkpoint_does_not_take_a_whole_ones_place(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = ("checkpoint.keep_best=0",)
    interrupted(small, monkeypatch, 10, *keep)
    for weights in (tmp_path / "run" / "checkpoints").glob("step-00000010-*/model.safetensors"):
        weights.write_bytes(b"")
    interrupted(small, monkeypatch, 9, *keep)
    names = sorted(folder.name[:13] for folder in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000007", "step-00000009"]


def test_what_killed_writers_left_is_swept_up(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(small, monkeypatch, 10)
    left = [tmp_path / "run" / ".model.safetensors.0.tmp", tmp_path / "run" / "checkpoints" / ".LATEST.0.tmp"]
    for file in left:
        file.write_text("half")
    assert run(*small("train", *LONG)).code == 0
    assert not any(file.exists() for file in left)
