"""The same run on 1, 2 and 4 real ranks, by horovodrun (Gloo) and mpirun: what must be equal, and how equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launching
from tests.ranks.launching import horovodrun, mpirun, rows, succeed, trainer, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launcher = Callable[[int, list[str]], list[str]]
STEPS = 50


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return launching.prepare(tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def alone(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process without any launcher: 4 micro-batches accumulated."""
    out = tmp_path_factory.mktemp("alone") / "run"
    succeed(trainer("train", *words({**settings, "train.max_steps": STEPS, "output.dir": out})))
    return out


def run(launcher: Launcher, ranks: int, settings: dict[str, object], out: Path, steps: int = STEPS) -> Path:
    succeed(launcher(ranks, trainer("train", *words({**settings, "train.max_steps": steps, "output.dir": out}))))
    return out


def column(run: Path, name: str) -> list[float]:
    return [row[name] for row in rows(run, "step")]


@pytest.mark.parametrize(("launcher", "ranks"), [(horovodrun, 2), (horovodrun, 4), (mpirun, 2), (mpirun, 4)])
def test_any_world_has_the_loss_curve_of_one_rank(
    launcher: Launcher, ranks: int, settings: dict[str, object], alone: Path, tmp_path: Path
) -> None:
    other = run(launcher, ranks, settings, tmp_path / "run")
    assert len(column(alone, "loss")) == STEPS
    assert column(other, "loss") == pytest.approx(column(alone, "loss"), abs=1e-4)
    assert column(other, "gradient_norm")[0] == pytest.approx(column(alone, "gradient_norm")[0], rel=1e-5)
    counted = ("accuracy", "excluded_edge_share", "negatives_true_edge_share", "negatives_masked_share")
    for name in counted:
        assert column(other, name)[0] == pytest.approx(column(alone, name)[0], abs=1e-6)
    assert json.loads((other / "result.json").read_text())["world"]["size"] == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_world_repeats_bit_for_bit(ranks: int, settings: dict[str, object], tmp_path: Path) -> None:
    first, second = (run(horovodrun, ranks, settings, tmp_path / name, steps=20) for name in ("a", "b"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert column(first, "loss") == column(second, "loss")


def test_metrics_are_equal_on_1_2_and_4_ranks(alone: Path) -> None:
    command = trainer("eval", str(alone), "-o", "json")

    def document(text: str) -> Any:
        lines = [line.partition("<stdout>:")[2] or line for line in text.splitlines()]  # horovodrun's prefix
        return json.loads("\n".join(lines))

    one = document(succeed(command))
    assert one["mrr"] > 0.05
    assert document(succeed(horovodrun(2, command))) == one
    assert document(succeed(mpirun(4, command))) == one


def test_only_rank_0_writes(settings: dict[str, object], tmp_path: Path) -> None:
    out = run(horovodrun, 2, settings, tmp_path / "run", steps=2)
    assert sorted(file.name for file in out.iterdir()) == [
        "checkpoints", "config.yaml", "curves.png", "metrics.jsonl", "model.safetensors", "result.json",
    ]  # fmt: skip
    assert [row["step"] for row in rows(out, "step")] == [1, 2]
