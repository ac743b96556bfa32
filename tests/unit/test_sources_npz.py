"""The npz source, on the shared PubMed-with-years files where they lie beside the checkout, and on small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_trainer.config import DataSection
from horovod_trainer.data.sources import npz
from horovod_trainer.errors import InvalidInput, NotFound
from tests.raw import SHARED, open_prepared, silent

PUBMED = SHARED / "data" / "pubmed-temporal"


def load(path: Path) -> Any:
    return npz.load(DataSection(source="npz", path=str(path)), silent)


def write_split(folder: Path, dtype: Any) -> None:
    """Write a graph of 300 papers and a split, ids as small unsigned integers: u * N + v wraps in those."""
    edges = np.array([(u, v) for u in range(1, 300) for v in (u - 1, u // 2) if u != v]).T
    held = {"source": [299, 250], "valid_target": [298, 249], "test_target": [149, 125]}
    negatives: dict[str, Any] = {f"{part}_target_neg": np.array([[1, 2], [3, 4]], dtype) for part in ("valid", "test")}
    out = {(299, 298), (250, 249), (299, 149), (250, 125)}
    train = np.array([edge for edge in edges.T.tolist() if tuple(edge) not in out]).T
    np.savez(folder / "graph.npz", edge_index=edges.astype(dtype), num_nodes=300, y=np.arange(300), pmid=np.arange(300))
    parts: dict[str, Any] = {name: np.array(ids, dtype) for name, ids in held.items()}
    np.savez(folder / "split.npz", train_edge=train.astype(dtype), **parts, **negatives)


def test_small_unsigned_ids_do_not_wrap(tmp_path: Path) -> None:
    write_split(tmp_path, np.uint16)
    config = DataSection(source="npz", path=str(tmp_path), store=str(tmp_path / "store"))
    store = open_prepared(config)
    assert store.held_out("valid").edge.tolist() == [[299, 298], [250, 249]]
    assert store.held_out("test").negatives.tolist() == [[1, 2], [3, 4]]  # type: ignore[union-attr]  # they are there
    raw = load(tmp_path)
    pairs = set(map(tuple, raw.split.train.T.tolist()))
    assert set(zip(store.train_source.tolist(), store.train_target.tolist(), strict=True)) == pairs
    assert raw.edges.dtype == raw.split.train.dtype == np.int32


def test_training_edges_the_wrong_way_round_are_named(tmp_path: Path) -> None:
    write_split(tmp_path, np.int32)
    with np.load(tmp_path / "split.npz") as split:
        members = dict(split)
    np.savez(tmp_path / "split.npz", **{**members, "train_edge": members["train_edge"].T})
    with pytest.raises(InvalidInput, match=r"train edges: must be \[2, E\]"):
        open_prepared(DataSection(source="npz", path=str(tmp_path), store=str(tmp_path / "store")))


def test_labels_are_never_features(tmp_path: Path) -> None:
    write_split(tmp_path, np.uint16)
    assert load(tmp_path).features is None


@pytest.mark.parametrize("counts", ["x_indptr", "x_rownnz"])
def test_sparse_features(tmp_path: Path, counts: str) -> None:
    dense = np.array([[0, 1.5, 0], [0, 0, 0], [2, 0, 3]], np.float32)
    sizes = (dense != 0).sum(1)
    rows = {"x_indptr": np.concatenate([[0], np.cumsum(sizes)]), "x_rownnz": sizes.astype(np.uint16)}
    np.savez(
        tmp_path / "a.npz", edge_index=np.array([[0], [1]], np.uint8), x_data=dense[dense != 0].astype(np.float16),
        x_indices=dense.nonzero()[1].astype(np.uint16), x_shape=dense.shape, **{counts: rows[counts]},
    )  # fmt: skip
    assert np.array_equal(load(tmp_path / "a.npz").features, dense)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "no edge_index"),
        ({"edge_index": [[0], [1]]}, "needs num_nodes or features"),
        ({"edge_index": [[0.0], [1.0]], "num_nodes": 2}, "ids are integers"),
        ({"edge_index": [[0], [1]], "num_nodes": 2, "train_edge": [[0], [1]]}, "half a split: lacks source"),
        (
            {"edge_index": [[0], [1]], "x_data": [1.0], "x_indices": [5], "x_shape": [2, 2], "x_rownnz": [1, 0]},
            "matrix",
        ),
        ({"edge_index": [[0], [1]], "x_data": [1.0], "x_indices": [0], "x_shape": [2], "x_rownnz": [1, 0]}, "fit"),
        ({"edge_index": [[0], [1]], "num_nodes": [2, 3]}, "num_nodes: is one whole number"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, members: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {name: np.array(value) for name, value in members.items()}
    np.savez(tmp_path / "a.npz", other=np.zeros(1), **arrays)
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path / "a.npz")


def test_pickled_members_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", edge_index=np.array([[0], [1]], dtype=object), num_nodes=2)
    with pytest.raises(InvalidInput, match="pickled objects"):
        load(tmp_path / "a.npz")


def test_no_archive_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no \.npz"):
        load(tmp_path)


def test_pubmed_with_years_keeps_its_own_split(tmp_path: Path) -> None:
    """Without the shared folder: the same assertions on a graph written here."""
    if PUBMED.is_dir():
        path, nodes, train, queries, negatives = PUBMED, 19717, 42117, 1109, 1000
    else:
        write_split(tmp_path, np.uint16)
        path, nodes, train, queries, negatives = tmp_path, 300, 592, 2, 2
    store = open_prepared(DataSection(source="npz", path=str(path), store=str(tmp_path / "store")))
    counts = store.manifest["counts"]
    assert (counts["nodes"], counts["train_edges"], counts["valid"], counts["test"]) == (nodes, train, queries, queries)
    assert counts["negatives_per_query"] == negatives
    assert store.held_out("test").edge.shape == (queries, 2)
    checks = store.manifest["checks"]["test"]
    assert (checks["also_training"], checks["false_negatives"]) == (0, 0)
    assert checks["reverse_is_training"] == (3 if path == PUBMED else 0)
