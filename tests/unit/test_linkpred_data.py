"""The data behaviours that other projects got wrong: numbers are those of the shared linkpred collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_trainer.config import DataSection
from horovod_trainer.data.checks import check_split
from horovod_trainer.data.graph import Split, cleaned
from horovod_trainer.data.negatives import draw_uniform
from horovod_trainer.data.splits import make_split, true_citations
from horovod_trainer.data.store import HeldOut
from tests.raw import SHARED, citations, open_prepared, raw_graph

EMBEDDED: dict[str, Any] = {
    "01-split-must-not-keep-test-edge-either-way": {
        "num_nodes": 10,
        "edge_index": [[0, 1, 1, 2, 2, 3, 3, 4, 4, 5], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4]],
        "ask": {"num_val": 0.2, "num_test": 0.2},
    },
    "04-isolated-nodes-keep-their-rows": {"num_nodes": 3327, "isolated": 48},
    "09-two-directions-land-in-two-splits": {"edges_both_ways": [[0, 1], [1, 0], [1, 2], [2, 1], [2, 3], [3, 2]]},
}


def case(name: str) -> Any:
    """Return a case of the shared collection, or its copy here when that is not beside the checkout."""
    file = SHARED / "inputs" / "linkpred" / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else EMBEDDED[name]


def undirected(edges: Any) -> set[frozenset[int]]:
    return {frozenset(map(int, pair)) for pair in np.asarray(edges).reshape(-1, 2)}


@pytest.mark.parametrize("directed", [False, True])
def test_01_no_held_out_pair_stays_in_the_message_passing_graph_either_way(tmp_path: Path, directed: bool) -> None:
    data = case("01-split-must-not-keep-test-edge-either-way")
    settings = {"valid_fraction": data["ask"]["num_val"], "test_fraction": data["ask"]["num_test"]}
    raw = tmp_path / "raw.npz"
    np.savez(raw, edge_index=np.array(data["edge_index"]), num_nodes=data["num_nodes"], directed=directed)
    for seed in range(30):
        config = DataSection(
            source="npz", path=str(raw), store=str(tmp_path / f"store{seed}"), negatives=3, split_seed=seed, **settings
        )
        store = open_prepared(config)
        rows = np.repeat(np.arange(store.num_nodes), np.diff(store.indptr))
        passing = {(int(u), int(v)) for u, v in zip(rows, store.indices, strict=True)}
        assert passing
        for split in ("valid", "test"):
            edge = store.held_out(split).edge
            assert len(edge) == (2 if directed else 1)
            for u, v in edge.tolist():
                assert (u, v) not in passing
                assert (v, u) not in passing


def test_04_isolated_nodes_keep_their_rows(tmp_path: Path) -> None:
    data = case("04-isolated-nodes-keep-their-rows")
    n, isolated = data["num_nodes"], data["isolated"]
    edges, _ = citations(4, n - isolated, 3)  # the last `isolated` ids never occur in an edge
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    np.savez(tmp_path / "raw.npz", edge_index=edges, x=x)
    store = open_prepared(
        DataSection(source="npz", path=str(tmp_path / "raw.npz"), store=str(tmp_path / "store"), negatives=10)
    )
    assert store.num_nodes == n == len(store.indptr) - 1 == len(store.train_indptr) - 1
    assert store.features.shape == store.neighbour_sum.shape == (n, 2)
    assert np.array_equal(store.features, x)
    assert store.indptr[n - isolated] == store.indptr[n] == len(store.indices)
    assert not store.neighbour_sum[n - isolated :].any()


def test_09_both_directions_of_a_link_go_to_the_same_split() -> None:
    pairs = case("09-two-directions-land-in-two-splits")["edges_both_ways"]
    graph = cleaned(raw_graph(12, pairs))[0]  # directed, every link reciprocal; a few bystanders as negatives
    placed = set()
    for seed in range(30):
        config = DataSection(negatives=3, valid_fraction=0.3, test_fraction=0.3, split_seed=seed)
        split = make_split(graph, config)[0]
        parts = [undirected(split.train.T), undirected(split.valid.edge), undirected(split.test.edge)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 3
        assert len(split.valid.edge) == len(split.test.edge) == 2  # a link and its reverse
        placed.add(tuple(sorted(min(parts[2], key=sorted))))
    assert len(placed) == 3  # every link was the test link of some seed


def test_11_negatives_that_never_reach_half_of_the_nodes_are_noticed() -> None:
    edges, _ = citations(5, 500, 4)
    graph = cleaned(raw_graph(500, edges.T))[0]
    split = make_split(graph, DataSection(negatives=60))[0]
    truth = true_citations(graph)
    checks, warnings = check_split(graph, split, truth)
    assert warnings == []
    for part in checks.values():
        assert part["nodes_among_negatives"] == pytest.approx(part["nodes_if_uniform"], abs=0.01)

    def half(held_out: HeldOut) -> HeldOut:
        assert held_out.negatives is not None
        return HeldOut(held_out.edge, held_out.negatives // 2 * 2)

    checks, warnings = check_split(graph, Split(split.train, half(split.valid), half(split.test)), truth)
    assert checks["test"]["nodes_among_negatives"] == pytest.approx(0.5, abs=0.01)
    assert [sentence for sentence in warnings if sentence.startswith("biased test negatives: 50.0% of the nodes")]


def test_11_what_years_forbid_is_not_taken_for_bias() -> None:
    """Papers later than every source can never be negatives; uniform sampling would not reach them either."""
    edges, year = citations(5, 500, 4)
    year[300:] += 100  # and these cite nothing
    graph = cleaned(raw_graph(500, edges.T[edges[0] < 300], year=year))[0]
    split = make_split(graph, DataSection(negatives=100))[0]
    checks, warnings = check_split(graph, split, true_citations(graph))
    assert warnings == []
    assert checks["test"]["nodes_if_uniform"] == pytest.approx(0.6, abs=0.02)
    assert checks["test"]["nodes_among_negatives"] == pytest.approx(0.6, abs=0.02)


def test_12_evaluation_negatives_are_clean_and_unclean_ones_are_counted() -> None:
    edges, _ = citations(6, 60, 8)
    graph = cleaned(raw_graph(60, edges.T))[0]
    split = make_split(graph, DataSection(negatives=20))[0]
    truth = true_citations(graph)
    checks, _ = check_split(graph, split, truth)
    assert checks["valid"]["false_negatives"] == checks["test"]["false_negatives"] == 0
    assert split.test.negatives is not None
    unclean = split.test.negatives.copy()
    for row, source in enumerate(split.test.edge[:, 0].tolist()):
        unclean[row, 0] = edges[1, edges[0] == source][0]
    checks, warnings = check_split(graph, Split(split.train, split.valid, HeldOut(split.test.edge, unclean)), truth)
    assert checks["test"]["false_negatives"] == len(unclean)
    assert checks["test"]["false_negative_share"] == pytest.approx(1 / 20)
    assert any("of the test negatives are true edges (rate 0.05)" in sentence for sentence in warnings)


def test_12_training_draws_report_how_many_are_true_edges() -> None:
    edges, _ = citations(6, 60, 8)
    candidates = true_citations(cleaned(raw_graph(60, edges.T))[0])
    source, target = edges.astype(np.int32)
    drawn = draw_uniform(candidates, source, target, 50, key=1)
    true = {(int(u), int(v)) for u, v in edges.T}
    expected = sum((int(u), int(v)) in true for u, row in zip(source, drawn.tails, strict=True) for v in row)
    assert drawn.citing == expected > 0
    assert drawn.drawn == 50 * len(source)
