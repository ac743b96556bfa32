"""Hostile files: nothing in them runs, nothing lands outside, and the message names them."""

from __future__ import annotations

import collections
import io
import os
import pickle
import stat
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from horovod_trainer.data.archives import read_members, unpack
from horovod_trainer.data.sources.torchfiles import load_torch_file
from horovod_trainer.data.unpickle import SparseRows, load_pickle
from horovod_trainer.errors import InvalidInput


class Runs:
    """Pickles as a call that leaves a mark on disk."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("container", [True, False])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_malicious_split_file_is_refused_and_does_not_run(
    tmp_path: Path, mark: Path, protocol: int, container: bool, hidden: bool
) -> None:
    evil = Runs(mark)
    content = {"edge": np.array([evil, 1], dtype=object) if hidden else evil, "edge_neg": np.zeros((2, 2), np.int64)}
    file = tmp_path / "train.pt"
    torch.save(content, file, pickle_protocol=protocol, _use_new_zipfile_serialization=container)
    with pytest.raises(InvalidInput, match=r"train\.pt"):
        load_torch_file(file)
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the file would have run"


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"PK\x03\x04", b"\x80\x02]q\x00", b"rubbish" * 100])
def test_damaged_torch_files_are_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "valid.pt"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"valid\.pt"):
        load_torch_file(file)


def test_truncated_torch_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "valid.pt"
    torch.save({"edge": np.zeros((100, 2), np.int64)}, file)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(InvalidInput, match=r"valid\.pt"):
        load_torch_file(file)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_unpickler_refuses_calls_and_object_arrays(mark: Path, protocol: int) -> None:
    for content in (Runs(mark), [Runs(mark)], np.array([Runs(mark)], dtype=object), collections.OrderedDict, print):
        with pytest.raises(InvalidInput, match="file: refused"):
            load_pickle("file", io.BytesIO(pickle.dumps(content, protocol)))
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_unpickler_reads_what_planetoid_holds(protocol: int) -> None:
    matrix = csr_matrix(np.array([[0, 2.0], [1.0, 0]], np.float32))
    links = collections.defaultdict(list, {0: [1], 1: [0]})
    got_matrix = load_pickle("file", io.BytesIO(pickle.dumps(matrix, protocol)))
    assert isinstance(got_matrix, SparseRows)
    assert got_matrix.dense("file").tolist() == [[0, 2], [1, 0]]
    assert load_pickle("file", io.BytesIO(pickle.dumps(links, protocol))) == links


def test_arrays_of_numbers_survive_in_protocol_4() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    got = load_pickle("file", io.BytesIO(pickle.dumps({"a": array, "n": array[0, 1]}, 4)))
    assert np.array_equal(got["a"], array)
    assert got["n"] == 1


@pytest.mark.parametrize("name", ["../out.txt", "a/../../out.txt", "/out.txt", "C:\\out.txt", "..\\out.txt"])
def test_paths_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as box:
        box.writestr("fine.txt", "fine")
        box.writestr(name, "out")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tape:
        tape.addfile(tarfile.TarInfo(name), io.BytesIO())
    for archive in ("a.zip", "a.tar.gz"):
        with pytest.raises(InvalidInput, match="leads out of the folder"):
            unpack(tmp_path / archive, tmp_path / "deep" / "to", 1000)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a.tar.gz", "a.zip"]


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as box:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        box.writestr(link, "/etc/passwd")
    with tarfile.open(tmp_path / "a.tar", "w") as tape:
        for name, kind in (("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tape.addfile(entry)
    for archive, count in (("a.zip", 1), ("a.tar", 3)):
        with pytest.raises(InvalidInput, match="is a link or a device") as caught:
            unpack(tmp_path / archive, tmp_path / "to", 1000)
        assert len(caught.value.problems) == count


def test_bombs_are_refused_by_stated_size_and_by_real_size(tmp_path: Path) -> None:
    bomb = tmp_path / "a.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as box:
        box.writestr("zeros", bytes(100_000))
    with pytest.raises(InvalidInput, match="more than the 9999"):
        unpack(bomb, tmp_path / "to", 9999)
    lying = bytearray(bomb.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = lying.index(signature) + offset
        lying[at : at + 4] = (10).to_bytes(4, "little")  # it now claims ten bytes
    bomb.write_bytes(lying)
    with pytest.raises(InvalidInput):
        unpack(bomb, tmp_path / "to", 9999)
    assert not (tmp_path / "to").exists()


def test_honest_archives_come_out_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as box:
        box.mkdir("d")
        box.writestr("d/one", "1")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tape:
        entry = tarfile.TarInfo("d/one")
        entry.size = 1
        tape.addfile(entry, io.BytesIO(b"1"))
    for archive in ("a.zip", "a.tgz"):
        files = unpack(tmp_path / archive, tmp_path / f"{archive}.out", 1000)
        assert files == [Path("d/one")]
        assert (tmp_path / f"{archive}.out" / "d" / "one").read_text() == "1"
        assert read_members(tmp_path / archive, ["d/one"], 1) == {"d/one": b"1"}
    with pytest.raises(InvalidInput, match="larger than expected"):
        read_members(tmp_path / "a.zip", ["d/one"], 0)
    with pytest.raises(InvalidInput, match="is not in the archive"):
        read_members(tmp_path / "a.zip", ["d/two"], 9)


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("<html>not found</html>")
    with pytest.raises(InvalidInput, match="neither a zip nor a tar"):
        unpack(tmp_path / "a.zip", tmp_path / "to", 9)
