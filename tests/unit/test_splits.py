"""Splits: by time as ogbl-citation2's, by pair, and negatives that are what they claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_trainer.config import DataSection
from horovod_trainer.data.graph import RawGraph, Split, cleaned
from horovod_trainer.data.splits import make_split
from horovod_trainer.errors import InvalidInput
from tests.raw import citations, raw_graph


def dated(num_nodes: int = 400, per_node: int = 5) -> RawGraph:
    edges, year = citations(1, num_nodes, per_node)
    return cleaned(raw_graph(num_nodes, edges.T, year=year))[0]


def split_of(graph: RawGraph, **settings: Any) -> Split:
    return make_split(graph, DataSection(**{"negatives": 7, **settings}))[0]


def pairs(edges: Any) -> set[tuple[int, int]]:
    """Return [Q, 2] as a set."""
    return {(int(u), int(v)) for u, v in edges}


def test_time_split_holds_out_two_references_of_each_of_the_latest_papers() -> None:
    graph = dated()
    split = split_of(graph, valid_fraction=0.05, test_fraction=0.05)
    true, year = pairs(graph.edges.T), graph.year
    assert year is not None
    source = split.valid.edge[:, 0]
    assert len(set(source.tolist())) == len(source) == round(0.05 * len(true))
    assert np.array_equal(source, split.test.edge[:, 0])
    train, valid, test = pairs(split.train.T), pairs(split.valid.edge), pairs(split.test.edge)
    assert len(train) + len(valid) + len(test) == len(true)
    assert train | valid | test == true
    references = {int(u): {v for w, v in true if w == u} for u in source}
    assert min(map(len, references.values())) >= 3
    others = {u for u, _ in true} - set(references)
    eligible = [u for u in others if sum(w == u for w, _ in true) >= 3]
    assert max(int(year[u]) for u in eligible) <= min(int(year[u]) for u in references)


def test_time_split_never_leaves_the_reverse_of_a_held_out_edge() -> None:
    edges, year = citations(2, 200, 5)
    year[:] = 2000  # all of one year, so that citations may be mutual
    mutual = np.concatenate([edges, edges[::-1, ::3]], axis=1)
    graph = cleaned(raw_graph(200, mutual.T, year=year))[0]
    split = split_of(graph, valid_fraction=0.1, test_fraction=0.1)
    held = pairs(split.valid.edge) | pairs(split.test.edge)
    assert not {(v, u) for u, v in held} & (pairs(split.train.T) | held)


def test_negatives_are_not_later_not_the_source_and_no_true_edge() -> None:
    graph = dated()
    split = split_of(graph, negatives=50)
    true, year = pairs(graph.edges.T), graph.year
    assert year is not None
    for held_out in (split.valid, split.test):
        assert held_out.negatives is not None
        assert held_out.negatives.shape == (len(held_out.edge), 50)
        for (u, _), row in zip(held_out.edge.tolist(), held_out.negatives.tolist(), strict=True):
            assert u not in row
            assert not {(u, v) for v in row} & true
            assert max(year[row]) <= year[u]
    assert not np.array_equal(split.valid.negatives, split.test.negatives)  # type: ignore[arg-type]  # both are there


def test_the_seed_decides_and_nothing_else() -> None:
    graph = dated()
    same, again, other = (split_of(graph, split_seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(same.test.edge, again.test.edge)
    assert np.array_equal(same.test.negatives, again.test.negatives)  # type: ignore[arg-type]  # both are there
    assert not np.array_equal(same.test.edge, other.test.edge)


def test_undirected_negatives_reject_links_from_either_side() -> None:
    links = [(u, v) for u in range(12) for v in range(u) if (u + v) % 3]
    graph = cleaned(raw_graph(12, links, directed=False))[0]
    split = split_of(graph, negatives=2, valid_fraction=0.2, test_fraction=0.2)
    true = set(links) | {(v, u) for u, v in links}
    assert split.test.negatives is not None
    for (u, _), row in zip(split.test.edge.tolist(), split.test.negatives.tolist(), strict=True):
        assert not {(u, v) for v in row} & (true | {(u, u)})


def test_too_few_candidates_say_which_and_how_many() -> None:
    graph = dated(40, 3)
    with pytest.raises(InvalidInput, match=r"data\.negatives: .* fewer candidates .* source \d+ has \d+"):
        split_of(graph, negatives=39)


def test_a_split_that_is_not_there_is_an_error() -> None:
    graph = dated()
    with pytest.raises(InvalidInput, match="without a split of its own"):
        split_of(graph, split="given")
    undated = cleaned(raw_graph(400, graph.edges.T))[0]
    with pytest.raises(InvalidInput, match="has no years"):
        split_of(undated, split="time")


def test_fewer_sources_than_asked_for_are_a_warning() -> None:
    _, warnings = make_split(dated(), DataSection(negatives=5, valid_fraction=0.4, test_fraction=0.4))
    assert len(warnings) == 1
    assert "fewer than" in warnings[0]


def test_undirected_training_pairs_get_both_directions_about_equally() -> None:
    graph = cleaned(raw_graph(400, citations(1, 400, 5)[0].T, directed=False))[0]
    source, target = split_of(graph).train
    share = float((source < target).mean())
    assert 0.4 < share < 0.6
