"""The scaling model: values solved by hand, its limits, and a fit that finds what made the samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.alpha_beta import (
    Fit,
    Link,
    Sample,
    Work,
    error_percent,
    expected_slowest,
    fit_ring,
    hierarchical,
    ring,
    wire_bytes,
)

SLOW = Link("slow", 1e-3, 1e6)
FAST = Link("fast", 1e-6, 1e9)
links = st.builds(Link, st.just("any"), st.floats(0, 1e-2), st.floats(1e3, 1e12))
worlds = st.integers(1, 1024)
sizes = st.floats(0, 1e9)


def test_ring_solved_by_hand() -> None:
    # 4 ranks, 1 MB: 6 messages of 0.25 MB, each 1 ms + 250 ms
    assert ring(4, 1e6, SLOW) == pytest.approx(6 * (1e-3 + 0.25))
    assert wire_bytes(4, 1e6) == 1.5e6


def test_hierarchical_solved_by_hand() -> None:
    # inside, 2 ranks: 2 messages of 0.5 MB at 1 GB/s; between, 3 nodes: 4 messages of a third of 1 MB at 1 MB/s
    inside, between = 2 * (1e-6 + 0.5e-3), 4 * (1e-3 + 1 / 3)
    assert hierarchical(3, 2, 1e6, FAST, SLOW) == pytest.approx(inside + between)


@given(links, sizes)
def test_a_world_of_one_costs_nothing(link: Link, nbytes: float) -> None:
    assert ring(1, nbytes, link) == hierarchical(1, 1, nbytes, link, link) == wire_bytes(1, nbytes) == 0.0
    assert Fit(1.0, link).seconds(1, nbytes) == 0.0


@given(worlds, worlds, sizes, sizes, links)
def test_more_ranks_or_more_bytes_never_cost_less(p: int, q: int, n: float, m: float, link: Link) -> None:
    (p, q), (n, m) = sorted((p, q)), sorted((n, m))
    assert ring(p, n, link) <= ring(q, m, link) * (1 + 1e-12)
    assert hierarchical(p, 8, n, FAST, link) <= hierarchical(q, 8, m, FAST, link) * (1 + 1e-12)


@given(st.integers(2, 64), sizes, links)
def test_one_rank_per_node_is_the_plain_ring(nodes: int, nbytes: float, link: Link) -> None:
    assert hierarchical(nodes, 1, nbytes, FAST, link) == ring(nodes, nbytes, link)


@given(st.integers(2, 64), st.integers(2, 16), sizes, links)
def test_a_hierarchy_of_equal_links_never_beats_the_bandwidth_bound(
    nodes: int, per_node: int, nbytes: float, link: Link
) -> None:
    assert hierarchical(nodes, per_node, nbytes, link, link) >= wire_bytes(nodes, nbytes) / link.beta * (1 - 1e-12)


@given(st.floats(1e-5, 1e-1), st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_fit_finds_what_made_the_samples(overhead: float, alpha: float, beta: float) -> None:
    truth = Fit(overhead, Link("truth", alpha, beta))
    made = [Sample(p, n, truth.seconds(p, n)) for p in (2, 4) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    found = fit_ring(made)
    for sample in made:
        assert found.seconds(sample.ranks, sample.nbytes) == pytest.approx(sample.seconds, rel=1e-4)


def test_with_one_number_of_ranks_all_latency_is_overhead() -> None:
    link = Link("truth", 1e-4, 1e9)
    found = fit_ring([Sample(2, n, 1e-3 + ring(2, n, link)) for n in (1 << 10, 1 << 20, 1 << 24)])
    assert found.link.alpha == 0.0
    assert found.overhead == pytest.approx(1e-3 + 2 * 1e-4, rel=1e-4)
    assert found.link.beta == pytest.approx(1e9, rel=1e-4)


def test_samples_of_one_rank_alone_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least two ranks"):
        fit_ring([Sample(1, 1024, 1e-3)])


@pytest.mark.parametrize(
    ("ranks", "want"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (100, 2.50759)]
)
def test_the_slowest_of_p(ranks: int, want: float) -> None:  # closed forms up to 3; 100: Harter 1961, table 1
    assert expected_slowest(ranks) == pytest.approx(want, abs=1e-3)


@given(st.integers(1, 300), st.integers(1, 300))
def test_more_ranks_have_a_slower_slowest(p: int, q: int) -> None:
    p, q = sorted((p, q))
    assert expected_slowest(p) <= expected_slowest(q)


def test_work_is_shared_but_for_what_every_rank_repeats() -> None:
    work = Work(micro_batch=2.0, deviation=0.5, repeated=1.0)
    assert work.seconds(4, 1) == 9.0
    assert work.seconds(1, 2) == pytest.approx(3.0 + 0.5 / math.sqrt(math.pi), abs=1e-3)


def test_refused_values() -> None:
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link("dead", 0.0, 0.0)
    with pytest.raises(ValueError, match="at least one rank"):
        ring(0, 1.0, FAST)
    with pytest.raises(ValueError, match="at least one rank"):
        expected_slowest(0)


def test_error_is_relative_to_what_was_measured() -> None:
    assert error_percent(1.1, 1.0) == pytest.approx(10.0)
