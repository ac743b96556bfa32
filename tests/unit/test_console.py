"""The console: who speaks, in which form, and that data and prose keep to their own streams."""

import io
import json
import logging
import sys
import time
from collections.abc import Iterator

import pytest

from horovod_trainer.console import get_logger, print_error, progress, setup_logging, stage_progress, table
from horovod_trainer.errors import InvalidInput, Problem

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOROVOD_TRAINER_LOG", "KUBERNETES_SERVICE_HOST", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    yield
    logger = get_logger()
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_rank_0_speaks_in_plain_lines_on_stderr(capsys: Capture) -> None:
    setup_logging()
    get_logger().info("epoch %d", 3)
    get_logger().warning("careful")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[9:] for line in err.splitlines()] == ["epoch 3", "warning: careful"]


def test_other_ranks_only_warn_and_say_who_they_are(capsys: Capture) -> None:
    setup_logging(rank=2)
    get_logger().info("not heard")
    get_logger().error("lost")
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["rank 2 error: lost"]


def test_set_up_twice_still_says_things_once(capsys: Capture) -> None:
    setup_logging()
    setup_logging()
    get_logger().info("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.parametrize(
    ("variable", "value", "as_json"),
    [
        ("HOROVOD_TRAINER_LOG", "json", True),
        ("HOROVOD_TRAINER_LOG", "auto", False),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1", True),
    ],
)
def test_json_when_asked_for_or_in_a_pod(
    variable: str, value: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv(variable, value)
    setup_logging(rank=1, run="a")
    get_logger().warning("two\nlines é")
    err = capsys.readouterr().err
    if not as_json:
        assert not err.startswith("{")
        return
    (line,) = err.splitlines()
    row = json.loads(line)
    assert row.pop("time").endswith("+00:00")
    assert row == {"level": "warning", "rank": 1, "run": "a", "message": "two\nlines é"}


def test_text_in_a_pod_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOROVOD_TRAINER_LOG", "text")
    setup_logging()
    get_logger().info("plain")
    assert capsys.readouterr().err.endswith(" plain\n")


def test_another_log_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TRAINER_LOG", "xml")
    with pytest.raises(InvalidInput, match=r"HOROVOD_TRAINER_LOG: is text, json or auto \(got xml\)"):
        setup_logging()


def test_every_problem_of_an_error_is_one_line_on_stderr(capsys: Capture) -> None:
    print_error([Problem("a.b", "is wrong", 3, "x.yaml:1"), Problem("", "also this")])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: a.b: is wrong (got 3) [x.yaml:1]\nerror: also this\n"


def test_a_table_in_a_pipe_is_whole_plain_and_literal(capsys: Capture) -> None:
    table("Results", ["name", "value"], [("[bold]mrr[/bold]", 0.25), ("x" * 300, 12)])
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["[bold]mrr[/bold]", "0.25"] in rows
    assert ["x" * 300, "12"] in rows


def test_numbers_stand_right_under_each_other(capsys: Capture) -> None:
    table("", ["value"], [(1,), (100,)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[-2].endswith("    1")
    assert lines[-1].endswith("  100")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_honoured_on_a_terminal(no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging()
    with progress("work", 10) as bar:
        bar.advance(5)
    assert ("\x1b[38;5;" in stream.getvalue()) == coloured
    assert "work" in stream.getvalue()


def test_progress_in_a_pipe_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    setup_logging()
    with progress("copy", 1000) as bar:
        for _ in range(10):
            now[0] += 2.0
            bar.advance(100, note="to disk")
    err = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in err] == [
        "copy: 300 of 1,000 (30%), 6 s, to disk",
        "copy: 600 of 1,000 (60%), 12 s, to disk",
        "copy: 900 of 1,000 (90%), 18 s, to disk",
    ]


def test_progress_of_an_unknown_total_counts(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    setup_logging()
    with progress("read", None) as bar:
        now[0] = 9.0
        bar.advance(1234)
    assert capsys.readouterr().err.endswith("read: 1,234, 9 s\n")


def test_other_ranks_show_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging(rank=1)
    with progress("work", 2) as bar:
        bar.advance()
    assert stream.getvalue() == ""


def test_a_log_line_during_a_live_bar_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging()
    with progress("work", 2) as bar:
        get_logger().info("[b]hello[/b]")
        bar.advance()
    assert "[b]hello[/b]" in stream.getvalue()
    assert sys.stderr is stream


def test_stages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging()
    stage_progress("read", 1, 2)
    stage_progress("write", 0, 1)
    stage_progress("write", 1, 1)
    text = stream.getvalue()
    assert text.index("read") < text.index("write")
    assert sys.stderr is stream
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor is shown again
