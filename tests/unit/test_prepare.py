"""prepare: clean, exact, idempotent, and honest about what it could not get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.data.graph import MOST_NODES, cleaned
from horovod_trainer.data.prepare import prepare_store
from horovod_trainer.data.sources import pubmed
from horovod_trainer.data.store import Store, open_store
from horovod_trainer.errors import InvalidInput, Unreachable
from tests.raw import citations, open_prepared, raw_graph, silent

SMALL = Synthetic(nodes=300, references=6.0, features=4, years=5)


def section(tmp_path: Path, **settings: Any) -> DataSection:
    store = str(tmp_path / "store")
    return DataSection(**{"source": "synthetic", "store": store, "negatives": 5, "synthetic": SMALL, **settings})


def stages(config: DataSection) -> list[str]:
    """Return what prepare said it did."""
    said: list[str] = []
    prepare_store(config, lambda stage, done, total: said.append(stage))
    return said


def rows(store: Store) -> list[np.ndarray]:
    return [store.indices[store.indptr[i] : store.indptr[i + 1]] for i in range(store.num_nodes)]


def test_second_prepare_does_nothing_and_says_so(tmp_path: Path) -> None:
    config = section(tmp_path)
    assert stages(config)[-1] == "digest"
    manifest = tmp_path / "store" / "manifest.json"
    before = (manifest.stat().st_ino, manifest.read_bytes())
    assert list(dict.fromkeys(stages(config))) == ["verify", "unchanged"]
    assert (manifest.stat().st_ino, manifest.read_bytes()) == before


def test_other_settings_or_damage_make_it_again(tmp_path: Path) -> None:
    first = open_prepared(section(tmp_path)).manifest["digest"]
    assert open_prepared(section(tmp_path, split_seed=1)).manifest["digest"] != first
    assert open_prepared(section(tmp_path)).manifest["digest"] == first  # a pure function of the settings
    (tmp_path / "store" / "indices.npy").unlink()
    assert open_prepared(section(tmp_path)).manifest["digest"] == first


def test_changed_raw_files_make_it_again(tmp_path: Path) -> None:
    raw = tmp_path / "raw.npz"
    edges, year = citations(1, 60, 4)
    config = section(tmp_path, source="npz", path=str(raw))
    for count in (60, 61):
        np.savez(raw, edge_index=edges, num_nodes=count, node_year=np.resize(year, count))
        assert open_prepared(config).num_nodes == count
    assert list(dict.fromkeys(stages(config))) == ["verify", "unchanged"]


def test_what_a_killed_prepare_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".store.abcd_123.partial").mkdir()
    prepare_store(section(tmp_path), silent)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".store.lock", "store"]


def test_message_graph_and_neighbour_aggregates_against_a_plain_reference(tmp_path: Path) -> None:
    store = open_prepared(section(tmp_path, neighbour_max=True))
    expected: list[set[int]] = [set() for _ in range(store.num_nodes)]
    for u, v in zip(store.train_source.tolist(), store.train_target.tolist(), strict=True):
        expected[u].add(v)
        expected[v].add(u)
    got = rows(store)
    assert [row.tolist() for row in got] == [sorted(row) for row in expected]
    assert store.neighbour_max is not None
    for node, row in enumerate(got):
        total = store.features[row].sum(0, dtype=np.float64)
        np.testing.assert_allclose(store.neighbour_sum[node], total, rtol=1e-6, atol=1e-6)
        top = store.features[row].max(0) if len(row) else np.zeros(4)
        np.testing.assert_array_equal(store.neighbour_max[node], top)


@pytest.mark.parametrize(("kind", "order"), [("l1", 1), ("l2", 2)])
def test_rows_are_normalised_and_zero_rows_stay_zero(tmp_path: Path, kind: str, order: int) -> None:
    edges, _ = citations(1, 60, 4)
    x = np.abs(np.random.default_rng(0).normal(size=(60, 3)))
    x[7] = 0
    np.savez(tmp_path / "raw.npz", edge_index=edges, x=x)
    store = open_prepared(section(tmp_path, source="npz", path=str(tmp_path / "raw.npz"), row_normalise=kind))
    norm = np.linalg.norm(store.features, ord=order, axis=1)
    np.testing.assert_allclose(norm, np.where(np.arange(60) == 7, 0.0, 1.0), rtol=1e-6)


def test_half_precision_sums_are_of_the_stored_values_in_single_precision(tmp_path: Path) -> None:
    store = open_prepared(section(tmp_path, feature_type="float16"))
    assert store.features.dtype == np.float16
    assert store.neighbour_sum.dtype == np.float32
    row = rows(store)[5]
    assert len(row) > 0
    expected = store.features[row].astype(np.float32).sum(0)
    np.testing.assert_allclose(store.neighbour_sum[5], expected, rtol=1e-5, atol=1e-6)


def test_features_that_overflow_half_precision_are_refused(tmp_path: Path) -> None:
    edges, _ = citations(1, 60, 4)
    np.savez(tmp_path / "raw.npz", edge_index=edges, x=np.full((60, 1), 1e6))
    with pytest.raises(InvalidInput, match="do not fit float16"):
        prepare_store(section(tmp_path, source="npz", path=str(tmp_path / "raw.npz"), feature_type="float16"), silent)
    assert not (tmp_path / "store").exists()


def test_without_the_network_pubmed_is_generated_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(progress: Any) -> Path:
        raise Unreachable("the cable is cut")

    monkeypatch.setattr(pubmed, "_downloaded", unreachable)
    config = section(tmp_path, source="pubmed")
    manifest = open_prepared(config).manifest
    assert manifest["source"]["kind"] == "synthetic"
    assert "the cable is cut" in manifest["source"]["origin"]
    assert manifest["warnings"] == ["generated in place of pubmed: the cable is cut"]
    assert stages(config)[-1] == "unchanged"


def test_self_loops_and_duplicates_are_counted_and_dropped() -> None:
    pairs = [(0, 1), (1, 1), (0, 1), (2, 0), (1, 0)]
    graph, counts = cleaned(raw_graph(3, pairs))
    assert graph.edges.T.tolist() == [[0, 1], [1, 0], [2, 0]]
    assert counts == {"self_loops": 1, "duplicates": 1}
    graph, counts = cleaned(raw_graph(3, pairs, directed=False))
    assert graph.edges.T.tolist() == [[0, 1], [0, 2]]
    assert counts == {"self_loops": 1, "duplicates": 1, "merged_directions": 1}


def test_every_flaw_is_reported_at_once() -> None:
    features = np.zeros((4, 2), np.float32)
    features[3, 1] = np.nan
    year = np.array([2000.0, -1.0, 9999.0, np.nan])
    with pytest.raises(InvalidInput) as caught:
        cleaned(raw_graph(4, [(0, 1), (0, 4), (-1, 2)], features=features, year=year))
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "2 unknown ids" in text
    assert "node 3" in text
    assert "3 impossible years" in text


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (3, np.zeros((0, 2)), "it has no edge"),
        (3, [(1, 1), (2, 2)], "no edge is left"),
        (0, [(0, 1)], "num_nodes"),
        (MOST_NODES + 1, [(0, 1)], "int32"),
    ],
)
def test_unusable_graphs_are_refused(nodes: int, edges: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        cleaned(raw_graph(nodes, edges))


def test_a_graph_without_features_has_empty_ones(tmp_path: Path) -> None:
    edges, year = citations(1, 60, 4)
    np.savez(tmp_path / "raw.npz", edge_index=edges, num_nodes=60, node_year=year)
    store = open_store(prepare_store(section(tmp_path, source="npz", path=str(tmp_path / "raw.npz")), silent))
    assert store.features.shape == store.neighbour_sum.shape == (60, 0)
