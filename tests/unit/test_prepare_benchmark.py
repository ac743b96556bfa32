"""The prepare benchmark: what it reads of a running command and how it compares."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from benchmarks import prepare

GROWS = (
    "import json, time; a = bytearray(96 << 20); time.sleep(0.7); del a; time.sleep(0.5); print(json.dumps({'x': 1}))"
)


def test_a_watched_command_gives_its_answer_and_its_peak() -> None:
    run = prepare.watched([sys.executable, "-c", GROWS])
    assert run.answer == {"x": 1}
    assert 0.09 < run.own_gib() < 0.5
    assert run.own_gib(run.started) == 0.0  # nothing was read before it began
    assert run.resident_gib >= run.own_gib()
    assert run.readings[-1][1] < 0.09  # the last readings come after it was freed


def test_a_failing_command_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        prepare.watched([sys.executable, "-c", "raise SystemExit(3)"])


def test_memory_of_what_has_ended_is_none() -> None:
    assert prepare.own_gib(2**22 + 1) is None  # above the largest process number
    assert (prepare.own_gib(os.getpid()) or 0) > 0


def test_ratios_leave_out_what_follows_ogbs_processing() -> None:
    stages = {"read": 10.0, "digest": 5.0}
    ours = prepare.Run({"seconds": stages}, 100.0, 120.0, [(110.0, 1.0), (119.0, 2.0)], 4.0)
    answer: dict[str, Any] = {
        "seconds": {"process": 80.0, "symmetric": 20.0}, "processed_at": 290.0, "process_peak_gib": 10.0,
    }  # fmt: skip
    theirs = prepare.Run(answer, 200.0, 320.0, [(250.0, 8.0), (300.0, 16.0)], 20.0)
    result = prepare.summary(ours, theirs)
    assert (result["time_ratio_vs_ogb"], result["memory_ratio_vs_ogb"]) == (0.25, 0.25)
    assert result["resident_ratio_vs_ogb"] == 0.4
    table = prepare.rows(ours, theirs)
    assert [row[0] for row in table[:2]] == ["ours: read", "ours: digest"]
    assert table[-2] == ["OGB: process", 80.0, 8.0, 10.0]
    assert table[-1] == ["then: symmetric", 20.0, 16.0, 20.0]
