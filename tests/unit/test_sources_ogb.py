"""OGB's on-disk layout: ours and OGB's own class read the same folder identically, and damage is named."""

from __future__ import annotations

import functools
import gzip
import http.server
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from horovod_trainer.config import DataSection
from horovod_trainer.data.sources import ogb, ogb_download
from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Unreachable
from tests.raw import citations, open_prepared, silent, write_csv, write_ogb

N = 40


def citation2(root: Path, **save: Any) -> Path:
    """Write a small ogbl-citation2 folder: the graph holds the training edges only."""
    edges, year = citations(3, N, 4)
    held = np.flatnonzero(np.diff(edges[0], append=-1) != 0)[-6:]
    train = np.delete(edges, held, axis=1)
    rng = np.random.default_rng(0)
    parts: dict[str, dict[str, Any]] = {"train": {"source_node": train[0], "target_node": train[1]}}
    for part, rows in (("valid", held[:3]), ("test", held[3:])):
        negatives = rng.integers(0, 20, (3, 5))
        parts[part] = {
            "source_node": edges[0, rows], "target_node": edges[1, rows], "target_node_neg": negatives,
        }  # fmt: skip
    graph = {
        "edge_index": train, "num_nodes": N, "node-feat": rng.normal(size=(N, 3)), "node_year": year[:, None],
    }  # fmt: skip
    return write_ogb(root, "ogbl-citation2", "time", graph, parts, **save)


def pooled(root: Path, name: str = "ogbl-collab", kind: str = "time", **more: Any) -> Path:
    """Write a small undirected data set with shared negative pools."""
    links = np.array([(u, v) for u in range(N) for v in range(u) if (3 * u + v) % 7 == 0])
    parts: dict[str, dict[str, Any]] = {"train": {"edge": links[:-8]}}
    for number, part in enumerate(("valid", "test")):
        held = links[len(links) - 8 + 4 * number :][:4]
        parts[part] = {"edge": held, "edge_neg": np.array([[5, 5 + k] for k in range(1, 7)])}
    graph = {"edge_index": links[:-8].T, "num_nodes": N, **more}
    return write_ogb(root, name, kind, graph, parts)


def section(root: Path, name: str = "ogbl-citation2", **settings: Any) -> DataSection:
    return DataSection(**{"source": "ogb", "name": name, "path": str(root), "store": str(root / "store"), **settings})


def load(root: Path, name: str = "ogbl-citation2") -> Any:
    return ogb.load(section(root, name), silent)


@pytest.fixture
def trusting_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let OGB's class load the files this test wrote: since torch 2.6 it cannot load its own."""
    monkeypatch.setattr(torch, "load", functools.partial(torch.load, weights_only=False))
    monkeypatch.setenv("OUTDATED_IGNORE", "1")  # it would ask PyPI for its newest version


def as_numpy(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


@pytest.mark.usefixtures("trusting_torch")
@pytest.mark.parametrize("kind", ["LinkPropPredDataset", "PygLinkPropPredDataset"])
def test_citation2_is_read_as_ogbs_own_class_reads_it(tmp_path: Path, kind: str) -> None:
    citation2(tmp_path)
    import ogb.linkproppred as theirs

    dataset = getattr(theirs, kind)("ogbl-citation2", root=str(tmp_path))
    graph, split = dataset[0], dataset.get_edge_split()
    ours = load(tmp_path)
    assert ours.num_nodes == graph["num_nodes"] == N
    assert np.array_equal(ours.split.train, as_numpy(graph["edge_index"]))
    assert np.array_equal(ours.split.train, [as_numpy(split["train"][key]) for key in ("source_node", "target_node")])
    features = as_numpy(graph["node_feat" if kind.startswith("Link") else "x"])
    assert features.dtype == ours.features.dtype == np.float32
    assert np.array_equal(ours.features, features)
    assert np.array_equal(ours.year, as_numpy(graph["node_year"])[:, 0])
    for part in ("valid", "test"):
        held, expected = getattr(ours.split, part), {key: as_numpy(value) for key, value in split[part].items()}
        assert np.array_equal(held.edge, np.stack([expected["source_node"], expected["target_node"]], 1))
        assert np.array_equal(held.negatives, expected["target_node_neg"])


@pytest.mark.usefixtures("trusting_torch")
@pytest.mark.parametrize(("name", "kind"), [("ogbl-collab", "time"), ("ogbl-ddi", "target")])
def test_pooled_sets_are_read_as_ogbs_own_class_reads_them(tmp_path: Path, name: str, kind: str) -> None:
    folder = pooled(tmp_path, name, kind)
    count = load(tmp_path, name).split.train.shape[1]
    for extra in ("edge_weight", "edge_year"):  # collab's class wants them; we do not
        write_csv(folder / "raw" / f"{extra}.csv.gz", np.ones(count, int))
    if name == "ogbl-collab":
        write_csv(folder / "raw" / "node-feat.csv.gz", np.eye(N))
    from ogb.linkproppred import PygLinkPropPredDataset

    dataset = PygLinkPropPredDataset(name, root=str(tmp_path))
    split = dataset.get_edge_split()
    ours = load(tmp_path, name)
    both = np.concatenate([ours.split.train, ours.split.train[::-1]], axis=1)
    assert {*map(tuple, both.T.tolist())} == {*map(tuple, dataset[0].edge_index.T.tolist())}
    for part in ("valid", "test"):
        assert np.array_equal(getattr(ours.split, part).edge, split[part]["edge"].numpy())
        assert np.array_equal(getattr(ours.split, part).pool, split[part]["edge_neg"].numpy())
    shutil.rmtree(folder / "raw")  # what OGB's class left in processed/ is enough
    again = load(tmp_path, name)
    assert np.array_equal(again.split.train, ours.split.train)
    assert again.num_nodes == N


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("container", [True, False])
def test_every_format_torch_ever_wrote(tmp_path: Path, protocol: int, container: bool) -> None:
    citation2(tmp_path / "new")
    citation2(tmp_path / "old", pickle_protocol=protocol, _use_new_zipfile_serialization=container)
    new, old = load(tmp_path / "new"), load(tmp_path / "old")
    assert np.array_equal(new.split.train, old.split.train)
    assert np.array_equal(new.split.test.negatives, old.split.test.negatives)


def test_the_store_of_a_pooled_set_has_pools_and_no_negatives(tmp_path: Path) -> None:
    pooled(tmp_path)
    store = open_prepared(section(tmp_path, "ogbl-collab"))
    held_out = store.held_out("test")
    assert held_out.negatives is None
    assert held_out.pool is not None
    assert held_out.pool.shape == (6, 2)
    assert not store.directed
    assert store.manifest["counts"]["negatives_per_query"] is None


def test_counts_that_are_not_the_published_ones_are_said(tmp_path: Path) -> None:
    citation2(tmp_path)
    manifest = open_prepared(section(tmp_path)).manifest
    assert f"not the published ogbl-citation2: {N} nodes, published 2927963" in manifest["warnings"]
    assert set(manifest["source"]["digests"]) >= {"raw/edge.csv.gz", "split/time/test.pt"}


def test_truncated_csv_and_disagreeing_sizes_are_named(tmp_path: Path) -> None:
    folder = citation2(tmp_path)
    file = folder / "raw" / "node-feat.csv.gz"
    whole = file.read_bytes()
    os.truncate(file, len(whole) // 2)
    with pytest.raises(InvalidInput, match=r"node-feat\.csv\.gz"):
        load(tmp_path)
    shutil.copy(folder / "raw" / "node_year.csv.gz", file)
    assert load(tmp_path).features.shape == (N, 1)
    np.savetxt(file, np.ones((N - 1, 2)), delimiter=",")
    with pytest.raises(InvalidInput, match=rf"should hold {N} rows \(got {N - 1}\)"):
        load(tmp_path)
    file.write_bytes(whole)
    shutil.copy(folder / "split" / "time" / "valid.pt", folder / "split" / "time" / "train.pt")
    with pytest.raises(InvalidInput, match="the split 3 training edges"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("edge", b"0,1\n2,x\n", "not a readable gzipped CSV: .*'x'"),
        ("edge", b"0,1\n2,\n", "not a readable gzipped CSV"),
        ("edge", b"0,1\n2,3.5\n", "not a readable gzipped CSV: .*'3.5'"),
        ("edge", b"0,1\n2,3000000000\n", "not a readable gzipped CSV: .*'3000000000'"),
        ("edge", b"", "not a readable gzipped CSV"),
        ("node-feat", b"1,2\n3\n", "not a readable gzipped CSV: .*Expected 2 columns"),
        ("num-node-list", b"40\n41\n", "holds one count"),
    ],
)
def test_what_is_no_table_of_numbers_is_named(tmp_path: Path, name: str, text: bytes, said: str) -> None:
    file = citation2(tmp_path) / "raw" / f"{name}.csv.gz"
    file.write_bytes(gzip.compress(text))
    with pytest.raises(InvalidInput, match=rf"{name}\.csv\.gz: {said}"):
        load(tmp_path)
    file.write_bytes(text or b"no gzip")
    with pytest.raises(InvalidInput, match=rf"{name}\.csv\.gz: not a readable gzipped CSV"):
        load(tmp_path)


def test_an_empty_feature_is_nan_and_refused(tmp_path: Path) -> None:
    file = citation2(tmp_path) / "raw" / "node-feat.csv.gz"
    file.write_bytes(gzip.compress(b"1,2\n" * (N - 1) + b"1,\n"))
    assert np.isnan(load(tmp_path).features[-1, 1])
    with pytest.raises(InvalidInput, match=f"the first of node {N - 1}"):
        open_prepared(section(tmp_path))


def test_features_lie_in_no_file_that_has_a_name_and_not_in_memory(tmp_path: Path) -> None:
    citation2(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    features = load(tmp_path).features
    assert sorted(tmp_path.rglob("*")) == before
    while isinstance(features.base, np.ndarray):
        features = features.base
    assert isinstance(features, np.memmap)


def test_missing_and_unsuited_data_sets(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"data\.download=true"):
        ogb.fingerprint(section(tmp_path), silent)  # and no prompt, no network
    with pytest.raises(InvalidInput, match="knowledge graph"):
        load(tmp_path, "ogbl-biokg")
    with pytest.raises(InvalidInput, match="did you mean ogbl-collab"):
        load(tmp_path, "ogbl-colab")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve a folder in place of OGB's site."""
    served = tmp_path / "served"
    served.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(served))

        def log_message(self, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        monkeypatch.setattr(ogb_download, "BASE", f"http://127.0.0.1:{site.server_port}")
        yield served
        site.shutdown()


def test_download_when_asked(tmp_path: Path, server: Path) -> None:
    folder = citation2(tmp_path / "made")
    with zipfile.ZipFile(server / "citation-v2.zip", "w") as box:
        for file in folder.rglob("*.*"):
            box.write(file, Path("citation-v2") / file.relative_to(folder))
    store = open_prepared(section(tmp_path / "root", download=True))
    assert store.num_nodes == N
    assert sorted(file.name for file in (tmp_path / "root").iterdir()) == [".store.lock", "ogbl_citation2", "store"]


def test_download_never_replaces_what_is_there(tmp_path: Path, server: Path) -> None:
    (tmp_path / "root" / "ogbl_citation2").mkdir(parents=True)
    with pytest.raises(Conflict, match="move it away"):
        ogb.fingerprint(section(tmp_path / "root", download=True), silent)


def test_failed_download_leaves_nothing(tmp_path: Path, server: Path) -> None:
    with pytest.raises(Unreachable, match="could not be downloaded"):
        ogb.fingerprint(section(tmp_path / "root", download=True), silent)
    assert list((tmp_path / "root").iterdir()) == []
