"""Telemetry: the metrics file, TensorBoard beside it, and phases that add up to the step."""

import json
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from horovod_trainer.errors import InvalidInput, NotFound
from horovod_trainer.telemetry import PhaseTimers, Telemetry, read_metrics


def test_every_line_is_one_event_and_the_first_is_the_configuration(tmp_path: Path) -> None:
    with Telemetry(tmp_path / "run", 0, {"train": {"epochs": 2}}, tensorboard=False) as telemetry:
        telemetry.log("step", 1, 1, loss=0.5, phases={"forward": 0.25})
        telemetry.log("valid", 1, 1, mrr=np.float32(0.5), queries=np.int64(3), ended="no", full=True, hits=(1, 3))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(abs(row.pop("time") - time.time()) < 3600 for row in rows)
    assert rows == [
        {"event": "run", "step": 0, "epoch": 0, "config": {"train": {"epochs": 2}}},
        {"event": "step", "step": 1, "epoch": 1, "loss": 0.5, "phases": {"forward": 0.25}},
        {
            "event": "valid",
            "step": 1,
            "epoch": 1,
            "mrr": 0.5,
            "queries": 3,
            "ended": "no",
            "full": True,
            "hits": [1, 3],
        },
    ]


def test_what_is_not_finite_is_null_and_the_file_stays_json(tmp_path: Path) -> None:
    with Telemetry(tmp_path, 0, {}, tensorboard=False) as telemetry:
        telemetry.log("step", 1, 1, loss=float("nan"), phases={"x": float("inf")}, list=[np.float32("-inf"), 1])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    row = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert (row["loss"], row["phases"], row["list"]) == (None, {"x": None}, [None, 1])


def test_a_value_that_is_no_metric_is_refused(tmp_path: Path) -> None:
    with Telemetry(tmp_path, 0, {}, tensorboard=False) as telemetry, pytest.raises(TypeError, match="not object"):
        telemetry.log("step", 1, 1, loss=object())


def test_each_line_is_on_disk_whole_when_it_is_logged(tmp_path: Path) -> None:
    with Telemetry(tmp_path, 0, {}, tensorboard=False) as telemetry:
        telemetry.log("step", 1, 1, text="x" * 100_000)
        lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(json.loads(lines[1])["text"]) == 100_000
    assert lines[1].endswith(b"\n")


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Telemetry(tmp_path / "run", 1, {}, tensorboard=True) as telemetry:
        telemetry.log("step", 1, 1, loss=1.0)
    assert not (tmp_path / "run").exists()


def test_closing_twice_is_allowed(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 0, {}, tensorboard=False)
    telemetry.close()
    telemetry.close()
    telemetry.log("step", 1, 1, loss=1.0)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_tensorboard_holds_every_finite_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorboardX

    seen: list[tuple[str, float, int]] = []
    original = tensorboardX.SummaryWriter.add_scalar

    def spy(self: object, tag: str, value: float, step: int) -> None:
        seen.append((tag, value, step))
        original(self, tag, value, step)

    monkeypatch.setattr(tensorboardX.SummaryWriter, "add_scalar", spy)
    with Telemetry(tmp_path, 0, {"a": "b"}, tensorboard=True) as telemetry:
        telemetry.log(
            "step", 7, 1, loss=0.5, bad=float("nan"), flag=True, name="x", phases={"forward": np.float32(0.25)}
        )
    assert seen == [("step/loss", 0.5, 7), ("step/phases/forward", 0.25, 7)]
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"step/loss" in content
    assert b"a: b" in content


@pytest.mark.parametrize("rest", [b'{"event": "st', b"{}", b'{"a": "\xc3'])
def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 1}\n{"step": 2}\n' + rest)
    assert read_metrics(tmp_path / "m") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("line", [b"{", b"3", b"\xff"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(InvalidInput) as caught:
        read_metrics(tmp_path / "m")
    assert caught.value.problems[0].source == f"{tmp_path}/m:2"


def test_a_missing_metrics_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_metrics(tmp_path / "none")
    (tmp_path / "empty").touch()
    assert read_metrics(tmp_path / "empty") == []


class Clock:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_the_rest_are_the_step_time() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    for _ in range(2):
        with timers.phase("forward"):
            clock.now += 2
        clock.now += 0.5
        for _ in range(2):
            with timers.phase("backward"):
                clock.now += 3
        timers.step_done()
    clock.now += 50  # between the steps and the snapshot: nobody's
    assert timers.snapshot_and_reset() == {"forward": 4, "backward": 12, "other": 1}
    assert timers.snapshot_and_reset() == {"other": 0}


def test_time_between_a_snapshot_and_the_next_belongs_to_no_step() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    clock.now += 100
    with timers.phase("validate"):
        clock.now += 7
    timers.snapshot_and_reset()
    clock.now += 1
    timers.step_done()
    assert timers.snapshot_and_reset() == {"other": 1}


def test_a_phase_ends_when_its_work_fails() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    with suppress(ValueError), timers.phase("forward"):
        clock.now += 2
        raise ValueError
    with timers.phase("forward"):
        clock.now += 1
    timers.step_done()
    assert timers.snapshot_and_reset()["forward"] == 3


def test_phases_do_not_nest() -> None:
    timers = PhaseTimers()
    with timers.phase("outer"), pytest.raises(RuntimeError, match="counted twice"), timers.phase("inner"):
        pass


def test_on_the_real_clock_the_phases_are_the_step_time_within_five_percent() -> None:
    readings: list[float] = []

    def clock() -> float:
        readings.append(time.perf_counter())
        return readings[-1]

    timers = PhaseTimers(clock)
    for _ in range(5):
        with timers.phase("sleep"):
            time.sleep(0.01)
        with timers.phase("count"):
            sum(range(1000))
        timers.step_done()
    seconds = readings[-1] - readings[0]
    phases = timers.snapshot_and_reset()
    assert sum(phases.values()) == pytest.approx(seconds, rel=0.05)
    assert phases["sleep"] >= 0.05
