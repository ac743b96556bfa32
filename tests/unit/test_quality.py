"""The summary that `make quality` prints."""

from __future__ import annotations

from typing import Any

from benchmarks.quality import summary


def run(test: float, valid: float, seconds: float) -> dict[str, Any]:
    return {"test": {"mrr": test}, "valid": {"mrr": valid}, "wall_seconds": seconds}


def test_means_and_the_unbiased_deviation() -> None:
    assert summary([run(0.40, 0.38, 100), run(0.42, 0.40, 120), run(0.44, 0.42, 140)]) == {
        "test_mrr_mean": 0.42,
        "test_mrr_std": 0.02,
        "valid_mrr_mean": 0.4,
        "seconds_mean": 120.0,
        "seeds": 3,
    }


def test_one_seed_has_no_deviation() -> None:
    assert summary([run(0.4, 0.3, 10)])["test_mrr_std"] == 0.0
