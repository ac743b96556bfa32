"""The store on disk: whole or not at all, and every kind of damage is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.data.store import StoreWriter, open_store, verify_store
from horovod_trainer.errors import Conflict, InvalidInput, NotFound
from tests.raw import open_prepared


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = Synthetic(nodes=300, references=6.0, features=4, years=5)
    config = DataSection(source="synthetic", store=str(tmp_path / "store"), negatives=5, synthetic=settings)
    return open_prepared(config).path


def test_arrays_are_mapped_and_of_the_promised_types(folder: Path) -> None:
    store = open_store(folder)
    assert store.num_nodes == 300
    assert store.directed
    assert [store.indptr.dtype, store.indices.dtype, store.train_target.dtype] == [np.int64, np.int32, np.int32]
    assert store.neighbour_max is None
    for array in (store.indices, store.features, store.held_out("test").edge):
        assert not array.flags.writeable
        assert isinstance(array.base, np.memmap | memoryview) or array.base is not None
    assert np.array_equal(np.repeat(np.arange(300), np.diff(store.train_indptr)), store.train_source)
    assert verify_store(folder) == []


def test_no_store_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="`prepare`"):
        open_store(tmp_path / "nothing")


def test_truncated_file_is_named_on_opening(folder: Path) -> None:
    file = folder / "indices.npy"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InvalidInput, match=r"indices\.npy: truncated"):
        open_store(folder)
    assert [problem.path for problem in verify_store(folder)] == [str(file)]


def test_flipped_bit_is_named_by_verify(folder: Path) -> None:
    file = folder / "features.npy"
    content = bytearray(file.read_bytes())
    content[-7] ^= 0x10
    file.write_bytes(content)
    open_store(folder)  # a glance cannot tell
    problems = verify_store(folder)
    assert [problem.path for problem in problems] == [str(file)]
    assert "damaged" in problems[0].message


def test_swapped_files_are_named_by_verify(folder: Path) -> None:
    a, b = folder / "valid_edge.npy", folder / "test_edge.npy"  # same shape and type
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    messages = {Path(problem.path).name: problem.message for problem in verify_store(folder)}
    assert messages == {
        "valid_edge.npy": "swapped: it holds what belongs in test_edge.npy",
        "test_edge.npy": "swapped: it holds what belongs in valid_edge.npy",
    }


def test_missing_file_and_wrong_type_are_reported_together(folder: Path) -> None:
    (folder / "year.npy").unlink()
    size = (folder / "train_source.npy").stat().st_size
    np.save(folder / "train_source.npy", np.zeros((size - 128) // 4, np.float32))
    with pytest.raises(InvalidInput) as caught:
        open_store(folder)
    assert {Path(problem.path).name for problem in caught.value.problems} == {"year.npy", "train_source.npy"}


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}', '{"format": 1, "name": "x"}', "null"])
def test_damaged_manifest_is_an_error_not_a_traceback(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"manifest\.json"):
        open_store(folder)


def test_mangled_entries_are_errors_too(folder: Path) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["arrays"]["indptr.npy"] = {"shape": "x"}
    file.write_text(json.dumps(manifest))
    assert verify_store(folder)
    manifest["arrays"] = []
    file.write_text(json.dumps(manifest))
    with pytest.raises(InvalidInput, match="not what prepare writes"):
        open_store(folder)


def test_altered_manifest_is_named_by_verify(folder: Path) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["digest"] = "0" * 64
    file.write_text(json.dumps(manifest))
    assert [problem.path for problem in verify_store(folder)] == [str(file)]


def test_a_failed_write_leaves_the_old_store_and_nothing_else(folder: Path) -> None:
    before = open_store(folder).manifest

    def fail() -> None:
        with StoreWriter(folder) as writer:
            writer.put("indptr", np.zeros(3), np.int64)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert open_store(folder).manifest == before
    assert sorted(file.name for file in folder.parent.iterdir()) == [".store.lock", "store"]


def test_something_else_in_its_place_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(Conflict, match="not a store"), StoreWriter(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").exists()
