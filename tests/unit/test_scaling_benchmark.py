"""What the scaling and start-up benchmarks make of clocks and of Python's import times."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks.jobs import exposed, step_seconds, steps_within
from benchmarks.scaling import REPORTED, parse_link, reported_row
from benchmarks.startup import by_package

# two ranks, a step a second: the second rank is 0.2 s late, and both end 0.1 s after it came
FIRST = np.array([[step + 0.5, step + 0.8] for step in range(10)])
SECOND = np.array([[step + 0.7, step + 0.8] for step in range(11)])


def test_only_whole_steps_of_all_ranks_count() -> None:
    # steps 2 to 6 lie inside; the first of them may have begun before
    assert steps_within([FIRST, SECOND], (2.0, 7.0)).tolist() == [3, 4, 5, 6]


def test_a_step_cut_on_one_rank_does_not_count() -> None:
    late = SECOND + np.array([0.0, 0.4])
    assert steps_within([FIRST, late], (2.0, 7.0)).tolist() == [3, 4, 5]


def test_a_span_without_a_whole_step_has_none() -> None:
    assert len(steps_within([FIRST, SECOND], (2.0, 3.5))) == 0


def test_a_step_lasts_from_end_to_end() -> None:
    assert step_seconds(FIRST, np.array([3, 4])) == pytest.approx([1.0, 1.0])


def test_waiting_for_the_slowest_is_told_from_the_transfer() -> None:
    found = exposed([FIRST, SECOND], np.array([3, 4]))
    assert found == pytest.approx(
        {"waiting_ms": 100.0, "transfer_ms": 100.0}
    )  # the mean of 200 and 0, and of 100 twice


def test_imports_add_up_by_package() -> None:
    text = "import time: self [us] | cumulative | imported package\n"
    text += "import time:      1500 |       2000 |   torch.nn\nimport time:       500 |        500 |     torch\n"
    text += "import time:       100 |       2100 | numpy\nnoise | 1 |\n"
    assert by_package(text) == {"torch": 2.0, "numpy": 0.1}


def test_links_on_the_command_line() -> None:
    link = parse_link("25 GbE: TCP:23:30")
    assert link.name == "25 GbE: TCP"
    assert [link.alpha, link.beta] == pytest.approx([30e-6, 23e9 / 8])
    for wrong in ("25 GbE", "a:b:c", "a:0:1", "a:1:-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="want NAME:GBIT:MICROSECONDS"):
            parse_link(wrong)


def test_the_seed_projects_rows_are_what_it_reported() -> None:
    assert reported_row(REPORTED[-1])[:7] == [31, "reported", None, 9.88, 85.15, pytest.approx(2.971, abs=1e-3),
                                              pytest.approx(0.0958, abs=1e-4)]  # fmt: skip
