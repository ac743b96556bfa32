"""Checkpoints: complete or none, found by the pointer or without it, kept by rule, and whole whatever the disk does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from horovod_trainer.checkpoint import FOLDER, POINTER, STATE, Checkpoint, Checkpoints, read_checkpoint
from horovod_trainer.documents import digest
from horovod_trainer.errors import Conflict, InvalidInput, TrainerError


def checkpoint(step: int, value: float | None = None) -> Checkpoint:
    tensors = {"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step)}
    return Checkpoint({"step": step, "value": value}, {"model": tensors, "optimizer": {"first": torch.ones(step % 3)}})


def steps(run: Path) -> list[int]:
    folders = (folder.name for folder in (run / FOLDER).iterdir() if folder.is_dir())
    return sorted(int(name.split("-")[1]) for name in folders)


def latest(run: Path) -> int | None:
    found = Checkpoints(run, 1, 0).latest()
    if found is None:
        return None
    step = int(found.state["step"])
    assert torch.equal(found.groups["model"]["weight"], torch.full((3, 2), float(step)))
    assert int(found.groups["model"]["count"]) == step
    return step


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    place = Checkpoints(tmp_path, 2, 0).save(checkpoint(7, 0.5))
    read = read_checkpoint(place)
    assert (read.state["step"], read.state["value"], read.folder) == (7, 0.5, place)
    assert torch.equal(read.groups["optimizer"]["first"], torch.ones(1))
    assert latest(tmp_path) == 7


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    (tmp_path / FOLDER).touch()
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(1, 0, [6]), (2, 0, [5, 6]), (2, 1, [2, 5, 6]), (1, 2, [2, 4, 6]), (9, 9, [1, 2, 3, 4, 5, 6])],
)
def test_the_last_and_the_best_are_kept(tmp_path: Path, keep_last: int, keep_best: int, kept: list[int]) -> None:
    store = Checkpoints(tmp_path, keep_last, keep_best)
    for step, value in enumerate([0.1, 0.9, None, 0.8, 0.2, None], start=1):
        store.save(checkpoint(step, value))
    assert steps(tmp_path) == kept
    assert latest(tmp_path) == 6


def test_order_is_that_of_the_commits_not_of_the_steps(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1, 0)
    store.save(checkpoint(9))
    store.save(checkpoint(4))
    assert steps(tmp_path) == [4]
    assert latest(tmp_path) == 4


def test_of_two_equally_good_the_earlier_is_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1, 1)
    for step in (1, 2, 3):
        store.save(checkpoint(step, 0.5))
    assert steps(tmp_path) == [1, 3]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    store = Checkpoints(tmp_path, 3, 0)
    return [store.save(checkpoint(step)) for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "damage", ["cut", "flip", "missing", "state cut", "state flip", "state missing", "folder missing"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, three: list[Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = three[2] / (STATE if damage.startswith("state") else "model.safetensors")
    if damage.endswith("missing"):
        shutil.rmtree(three[2]) if damage.startswith("folder") else file.unlink()
    elif damage.endswith("cut"):
        os.truncate(file, file.stat().st_size // 2)
    else:
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    assert latest(tmp_path) == 2
    assert str(three[2]) in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"folder": 1}', '{"folder": "../..", "sha256": "x"}'])
def test_a_damaged_pointer_is_done_without(tmp_path: Path, three: list[Path], content: str) -> None:
    (tmp_path / FOLDER / POINTER).write_text(content)
    assert latest(tmp_path) == 3


def test_a_pointer_that_a_cache_holds_too_long_leads_to_a_whole_checkpoint(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1, 0)
    store.save(checkpoint(1))
    old = (tmp_path / FOLDER / POINTER).read_text()
    store.save(checkpoint(2))  # and the first is gone
    (tmp_path / FOLDER / POINTER).write_text(old)
    assert latest(tmp_path) == 2


def test_where_nothing_is_whole_all_flaws_are_named(tmp_path: Path, three: list[Path]) -> None:
    for folder in three:
        os.truncate(folder / "optimizer.safetensors", 3)
    with pytest.raises(InvalidInput) as caught:
        latest(tmp_path)
    assert len(caught.value.problems) == 3


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2, 0)
    store.save(checkpoint(1))
    left = tmp_path / FOLDER / "step-00000002-00000000"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == 1
    store.save(checkpoint(3))
    assert steps(tmp_path) == [1, 3]


def test_another_format_and_an_edited_state_are_refused(tmp_path: Path, three: list[Path]) -> None:
    state = json.loads((three[0] / STATE).read_text())
    del state["digest"]
    outside = {"../x.safetensors": {"bytes": 1, "sha256": ""}}
    for change in ({"format": 2}, {"files": outside}, {"step": "1"}, {"files": {"a": 1}}):
        edited = state | change
        (three[0] / STATE).write_text(json.dumps(edited | {"digest": digest(edited)}))
        with pytest.raises(InvalidInput, match=STATE):
            read_checkpoint(three[0])
    (three[0] / STATE).write_text(json.dumps(state | {"step": 2, "digest": digest(state)}))
    with pytest.raises(InvalidInput, match="not what was committed"):
        read_checkpoint(three[0])
    with pytest.raises(InvalidInput, match="is no checkpoint"):
        read_checkpoint(tmp_path)


# what the disk does


def attempt(store: Checkpoints, step: int) -> str | None:
    """Save; return what a refusal says, None when it went well."""
    try:
        store.save(checkpoint(step))
    except TrainerError as failure:
        return str(failure)
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir", "open"])
def test_whichever_call_fails_the_last_checkpoint_is_intact_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Let the n-th fsync, rename, mkdir or open of a save fail, for every n there is."""
    store, step, failed = Checkpoints(tmp_path, 2, 0), 0, 0
    store.save(checkpoint(step))
    real, countdown = getattr(os, call), [0]

    def failing(*args: object, **kwargs: object) -> object:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    for number in range(1, 100):
        step += 1
        countdown[0] = number
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            said = attempt(store, step)
        failed_now = said is not None
        assert said is None or (os.strerror(code) in said and f"step {step} could not be written" in said)
        reached = latest(tmp_path)
        assert reached == step if not failed_now else reached in (step - 1, step)
        failed += failed_now
        if countdown[0] > 0:  # no such call any more
            break
        store.save(checkpoint(step := step + 1))
        assert latest(tmp_path) == step
    assert failed >= 1
    assert not failed_now


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_on_a_disk_that_is_really_full_the_last_checkpoint_is_intact(tmp_path: Path) -> None:
    program = """
import subprocess, sys, torch
from pathlib import Path
from horovod_trainer.checkpoint import Checkpoint, Checkpoints
from horovod_trainer.errors import TrainerError
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=True)
store = Checkpoints(disk, 1, 0)
def save(step, numbers):
    store.save(Checkpoint({"step": step, "value": None}, {"model": {"w": torch.ones(numbers)}}))
save(1, 1000)
try:
    save(2, 1_000_000)
except TrainerError as failure:
    print(failure)
print(store.latest().state["step"], sorted(path.name for path in disk.glob("*/step-*")).__len__())
save(3, 1000)
print(store.latest().state["step"])
"""
    own_mounts = ["unshare", "--mount", sys.executable, "-c", program, str(tmp_path)]
    out = subprocess.run(own_mounts, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "No space left on device; step 1's is intact" in out[0]
    assert out[1:] == ["1 1", "3"]


# who writes


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, 1, 0)
    first.lock()
    with pytest.raises(Conflict, match=f"a run is writing there: process {os.getpid()}"):
        Checkpoints(tmp_path, 1, 0).lock()
    first.unlock()
    second = Checkpoints(tmp_path, 1, 0)
    second.lock()
    second.unlock()
