"""Staging: once a node, whole or not at all, nothing read from afar twice, nothing removed that is in use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.data.prepare import prepare_store
from horovod_trainer.data.staging import acquire
from horovod_trainer.data.store import MANIFEST, read_manifest
from horovod_trainer.errors import Conflict, InvalidInput, NotFound
from tests.commands import run


def quiet(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three stores of about the same size."""
    folder = tmp_path_factory.mktemp("far")
    stores = []
    for seed in range(3):
        synthetic = Synthetic(nodes=2000, references=4.0, features=64, seed=seed)
        config = DataSection(source="synthetic", store=str(folder / f"store{seed}"), synthetic=synthetic, negatives=20)
        stores.append(prepare_store(config, quiet))
    return stores


@pytest.fixture
def far(three: list[Path], tmp_path: Path) -> Path:
    """Return a store of this test's own."""
    return Path(shutil.copytree(three[0], tmp_path / "far"))


def settings(store: Path, stage: Path, limit: float | None = None) -> DataSection:
    return DataSection(store=str(store), stage=str(stage), stage_limit_gib=limit)


def digest(store: Path) -> str:
    return str(read_manifest(store)["digest"])


def gib(store: Path, times: float = 1.0) -> float:
    entries = read_manifest(store)["arrays"].values()
    return times * float(sum(entry["bytes"] for entry in entries)) / 2**30


def copies(stage: Path) -> set[str]:
    return {entry.name for entry in stage.iterdir() if entry.is_dir()}


def test_without_a_stage_the_store_is_used_where_it_lies(far: Path) -> None:
    assert acquire(DataSection(store=str(far)), quiet).store.path == far


def test_the_second_run_reads_nothing_but_the_manifest(far: Path, tmp_path: Path) -> None:
    first = acquire(settings(far, tmp_path / "near"), quiet).store
    for file in far.glob("*.npy"):
        file.unlink()
    second = acquire(settings(far, tmp_path / "near"), quiet).store
    assert second.manifest == first.manifest
    assert (second.features == first.features).all()
    assert copies(tmp_path / "near") == {digest(far)}


def test_training_starts_from_the_copy(small: Callable[..., list[object]], tmp_path: Path) -> None:
    stage = f"data.stage={tmp_path / 'near'}"
    assert run(*small("train", stage)).code == 0
    for file in (tmp_path / "store").glob("*.npy"):
        file.unlink()
    assert run(*small("train", stage)).code == 0
    assert run("eval", tmp_path / "run").code == 0, "the run's config says where the copy is"


CHILD = """
import sys
from horovod_trainer.config import DataSection
from horovod_trainer.data import staging
slow = float(sys.argv[3])
copy = staging._copy_file
def counted(source, target, advance):
    print("copied", source.name, flush=True)
    if slow:
        import time; time.sleep(slow)
    return copy(source, target, advance)
staging._copy_file = counted
lease = staging.acquire(DataSection(store=sys.argv[1], stage=sys.argv[2]), lambda stage, done, total: None)
print("ready", lease.store.num_nodes, flush=True)
"""


def child(far: Path, stage: Path, slow: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(far), str(stage), str(slow)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_copy_once(far: Path, tmp_path: Path) -> None:
    both = [child(far, tmp_path / "near", 0.02) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("copied" in text for text in said) == [False, True]
    assert all("ready 2000" in text for text in said)


def test_a_copier_killed_midway_leaves_no_store_and_the_next_one_succeeds(far: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    process = child(far, near, 0.2)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert copies(near) == {f"{digest(far)}.partial"}
    assert acquire(settings(far, near), quiet).store.num_nodes == 2000
    assert copies(near) == {digest(far)}


def test_damage_at_the_source_is_named_and_nothing_stays(far: Path, tmp_path: Path) -> None:
    with (far / "features.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1\2\3\4\5\6\7\x08")
    with pytest.raises(InvalidInput, match=r"features\.npy.*damaged"):
        acquire(settings(far, tmp_path / "near"), quiet)
    assert copies(tmp_path / "near") == set()


def test_every_missing_file_is_named(far: Path, tmp_path: Path) -> None:
    (far / "indices.npy").unlink()
    (far / "indptr.npy").write_bytes(b"short")
    with pytest.raises(InvalidInput) as caught:
        acquire(settings(far, tmp_path / "near"), quiet)
    assert [Path(problem.path).name for problem in caught.value.problems] == ["indices.npy", "indptr.npy"]


def test_a_damaged_copy_is_made_again(far: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    acquire(settings(far, near), quiet)
    (near / digest(far) / "features.npy").write_bytes(b"short")
    again = acquire(settings(far, near), quiet).store
    assert again.features.shape == (2000, 64)


def test_the_least_recently_used_copy_goes_first(three: list[Path], tmp_path: Path) -> None:
    near, limit = tmp_path / "near", gib(three[0], 2.5)
    for store in (three[0], three[1], three[0], three[2]):
        time.sleep(0.02)  # the file system's clock is coarse
        acquire(settings(store, near, limit), quiet)
    assert copies(near) == {digest(three[0]), digest(three[2])}


def test_what_is_in_use_is_never_removed(three: list[Path], tmp_path: Path) -> None:
    near, limit = tmp_path / "near", gib(three[0], 1.5)
    lease = acquire(settings(three[0], near, limit), quiet)
    with pytest.raises(Conflict, match="in use by running processes"):
        acquire(settings(three[1], near, limit), quiet)
    assert lease.store.features.shape == (2000, 64)
    del lease
    acquire(settings(three[1], near, limit), quiet)
    assert copies(near) == {digest(three[1])}


def test_a_limit_below_the_store_is_refused_before_anything_is_removed(three: list[Path], tmp_path: Path) -> None:
    near = tmp_path / "near"
    acquire(settings(three[0], near), quiet)
    with pytest.raises(InvalidInput, match="too small") as caught:
        acquire(settings(three[1], near, gib(three[1], 0.5)), quiet)
    assert caught.value.problems[0].path == "data.stage_limit_gib"
    assert copies(near) == {digest(three[0])}


def test_a_full_disk_is_refused(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(Conflict, match="has no room"):
        acquire(settings(far, tmp_path / "near"), quiet)


def test_a_folder_that_is_not_mounted_is_noticed(far: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is missing"):
        acquire(settings(far, tmp_path / "disk" / "near"), quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(Conflict, match="a file is in the way"):
        acquire(settings(far, tmp_path / "file"), quiet)
    with pytest.raises(InvalidInput, match="the store itself"):
        acquire(settings(far, far / "near"), quiet)


def test_a_manifest_that_names_no_digest_is_refused(far: Path, tmp_path: Path) -> None:
    """It would be a folder's name."""
    manifest = json.loads((far / MANIFEST).read_text())
    (far / MANIFEST).write_text(json.dumps(manifest | {"digest": "../elsewhere"}))
    with pytest.raises(InvalidInput, match="damaged"):
        acquire(settings(far, tmp_path / "near"), quiet)
