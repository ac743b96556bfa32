"""The generator: deterministic, causal, heavy-tailed, and learnable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.data.graph import RawGraph, cleaned
from horovod_trainer.data.sources import synthetic
from tests.raw import silent


def make(feature_type: Any = "float32", **settings: Any) -> RawGraph:
    return synthetic.load(
        DataSection(source="synthetic", feature_type=feature_type, synthetic=Synthetic(**settings)), silent
    )


@pytest.fixture(scope="module")
def graph() -> RawGraph:
    return make(nodes=6000, references=5.0, topics=8, features=32)


def test_the_seed_decides(graph: RawGraph) -> None:
    same = make(nodes=6000, references=5.0, topics=8, features=32)
    other = make(nodes=6000, references=5.0, topics=8, features=32, seed=1)
    assert np.array_equal(same.edges, graph.edges)
    assert np.array_equal(same.features, graph.features)  # type: ignore[arg-type]  # both are there
    assert not np.array_equal(other.edges, graph.edges)


def test_citations_go_back_in_time_and_need_no_clean_up(graph: RawGraph) -> None:
    assert graph.year is not None
    source, target = graph.edges
    assert (graph.year[target] <= graph.year[source]).all()
    _, dropped = cleaned(graph)
    assert dropped == {"self_loops": 0, "duplicates": 0}
    assert 4.5 < len(source) / graph.num_nodes < 5.5


def test_ids_say_nothing_about_age(graph: RawGraph) -> None:
    assert graph.year is not None
    assert abs(np.corrcoef(np.arange(graph.num_nodes), graph.year)[0, 1]) < 0.1


def test_popularity_is_heavy_tailed(graph: RawGraph) -> None:
    cited = np.sort(np.bincount(graph.edges[1], minlength=graph.num_nodes))[::-1]
    assert cited[: graph.num_nodes // 100].sum() > 0.08 * cited.sum()  # the top 1 %; a random graph gives about 2 %
    assert cited[0] < 0.05 * cited.sum()


def test_features_carry_the_topic_of_what_is_cited(graph: RawGraph) -> None:
    assert graph.features is not None
    x = graph.features / np.linalg.norm(graph.features, axis=1, keepdims=True)
    source, target = graph.edges
    linked = (x[source] * x[target]).sum(1).mean()
    random = (x[source] * x[np.random.default_rng(0).permutation(target)]).sum(1).mean()
    assert linked > random + 0.15


def test_references_of_a_paper_cite_each_other(graph: RawGraph) -> None:
    n = graph.num_nodes
    cites = [set[int]() for _ in range(n)]
    for u, v in graph.edges.T.tolist():
        cites[u].add(v)
    closed = sum(len(cites[u] & cites[v]) > 0 for u in range(n) for v in cites[u])
    shuffled = np.random.default_rng(0).permutation(n)
    by_chance = sum(len(cites[u] & cites[int(shuffled[v])]) > 0 for u in range(n) for v in cites[u])
    assert closed > 4 * by_chance


def test_half_precision_features() -> None:
    features = make("float16", nodes=50, features=8).features
    assert features is not None
    assert features.dtype == np.float16


def test_smallest_size_allowed() -> None:
    assert make(nodes=10, topics=1, references=2.0).edges.shape[1] > 0
