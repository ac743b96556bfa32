"""What the benchmarks compute from what they measured."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import ours_throughput, setup_peers, throughput, time_to_quality
from docker.install import CONSTRAINTS


def run(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds_per_step": seconds, "edges_per_second": 1024 / seconds, **more}


def curve(*points: tuple[float, float]) -> time_to_quality.Curve:
    return [{"epoch": i + 1.0, "seconds": seconds, "mrr": mrr} for i, (seconds, mrr) in enumerate(points)]


def test_products_of_two_layers() -> None:
    products = ours_throughput.multiplications([10, 4], [3, 5, 7])
    assert products == [(10, 6, 5), (6, 10, 5), (4, 10, 7), (10, 4, 7), (4, 7, 10)]
    # layer 1 forward and weights, layer 2 forward, weights and input: 2 m k n each
    assert ours_throughput.flops(products) == 2 * (2 * 10 * 6 * 5) + 3 * (2 * 4 * 10 * 7)


def test_ratios_are_medians_of_turns_and_name_both_peers() -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for shape in throughput.SHAPES:
        runs[f"{shape} ours"] = [run(s, floor_seconds=0.1) for s in (0.2, 0.25, 9.0)]
        runs[f"{shape} pyg"] = [run(s, variant="layered") for s in (1.6, 2.0, 18.0)]
        runs[f"{shape} same_math"] = [run(s) for s in (0.5, 0.5, 0.6)]
        runs[f"{shape} assembled"] = [run(s, variant="trimmed") for s in (4.0, 4.0, 9.0)]
    result = throughput.summary(runs, dict.fromkeys(throughput.SHAPES, "trimmed"))
    assert result["ratio_vs_pyg_2_layers"] == result["ratio_vs_pyg_3_layers"] == 8.0
    assert result["ratio_vs_assembled_2_layers"] == 16.0
    assert result["ratio_same_math"] == result["ratio_same_math_3"] == 4.0
    assert (result["floor_seconds_2_layers"], result["seconds_per_step_2_layers"]) == (0.1, 0.25)


def test_the_quickest_variant_counts() -> None:
    tried = {
        "2_layers": {
            "layered": run(3.0),
            "trimmed": run(1.5),
            "link_loader": run(13.0),
            "link_loader_sparse": run(12.0),
        }
    }
    assert throughput.quickest(tried, "2_layers", throughput.VARIANTS["2_layers"]) == "trimmed"
    assert throughput.quickest(tried, "2_layers", throughput.STOCK) == "layered"


def test_validations_are_in_seconds_since_the_command() -> None:
    rows = [
        {"event": "run", "time": 100.0, "epoch": 0},
        {"event": "step", "time": 101.0, "epoch": 1},
        {"event": "valid", "time": 107.5, "epoch": 2, "mrr": 0.25},
        {"event": "test", "time": 109.0, "epoch": 2, "mrr": 0.5},
    ]
    assert time_to_quality.validations(rows, 97.5) == [{"epoch": 2, "seconds": 10.0, "mrr": 0.25}]


def test_reaching_is_the_first_time_at_or_above() -> None:
    points = curve((5, 0.2), (10, 0.3), (15, 0.28), (20, 0.4))
    assert time_to_quality.reached(points, 0.3) == 10
    assert time_to_quality.reached(points, 0.35) == 20
    assert time_to_quality.reached(points, 0.5) is None


def test_time_ratio_is_of_medians_over_seeds() -> None:
    peers = [curve((50, 0.3), (100, 0.4)), curve((50, 0.35), (80, 0.42)), curve((60, 0.38), (120, 0.41))]
    own = [curve((10, 0.39), (20, 0.41)), curve((10, 0.3), (30, 0.42)), curve((10, 0.41))]
    result = time_to_quality.summary({"sampled": peers, "ours": own}, "sampled", 4.0)
    assert (result["target_valid_mrr"], result["peer_seconds"], result["our_seconds"]) == (0.41, 100.0, 20.0)
    assert result["time_ratio_vs_pyg"] == 0.2


def test_no_ratio_where_most_runs_never_get_there() -> None:
    never = [curve((10, 0.1)), curve((10, 0.2)), curve((10, 0.5))]
    result = time_to_quality.summary({"full": [curve((50, 0.4))], "ours": never}, "full", 4.0)
    assert result["time_ratio_vs_pyg"] is None
    assert result["runs_that_got_there"] == 1


def test_every_peer_has_the_same_budget() -> None:
    assert len({len(tried) for tried in time_to_quality.TRIED.values()}) == 1
    assert all(number < len(time_to_quality.TRIED[kind]) for kind, number in time_to_quality.BEST.items())


def test_the_peers_share_our_versions_but_for_setuptools() -> None:
    ours = CONSTRAINTS.read_text()
    theirs = setup_peers.peer_constraints(ours)
    changed = set(theirs.splitlines()) ^ set(ours.splitlines())
    assert {line.split("==")[0] for line in changed} == {"setuptools"}
    found = re.search(r"^setuptools==(\d+)", theirs, re.MULTILINE)
    assert found is not None
    assert int(found[1]) < 81  # pkg_resources is gone from there on


def test_a_new_torch_is_a_new_environment() -> None:
    ours = CONSTRAINTS.read_text()
    other = re.sub(r"^torch==.*$", "torch==9.9.9", ours, flags=re.MULTILINE)
    assert setup_peers.wanted(ours, "") != setup_peers.wanted(other, "")
    assert setup_peers.wanted(ours, "") == setup_peers.wanted(ours, "")


@pytest.mark.parametrize("requirement", setup_peers.EXTENSIONS)
def test_wheels_are_found_by_version_and_python(requirement: str) -> None:
    name, version = requirement.split("==")
    assert setup_peers.wheel_pattern(requirement).startswith(f"{name.replace('-', '_')}-{version}-cp3")
