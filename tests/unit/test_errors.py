"""Errors: how a problem reads, and that every kind has its own exit code."""

import pytest

from horovod_trainer.errors import (
    CommunicationFailed,
    Conflict,
    Diverged,
    ExitCode,
    InvalidInput,
    NotFound,
    PlacementError,
    Problem,
    TrainerError,
    Unreachable,
    nearest,
    shorten,
)


def test_a_problem_reads_path_message_got_source() -> None:
    assert str(Problem("train.epochs", "must be at least 1", 0, "a.yaml:3")) == (
        "train.epochs: must be at least 1 (got 0) [a.yaml:3]"
    )


def test_what_a_problem_lacks_leaves_no_trace() -> None:
    assert str(Problem("", "no ranks")) == "no ranks"
    assert str(Problem("x", "wrong", False)) == "x: wrong (got False)"


def test_what_was_got_stays_on_one_short_line() -> None:
    assert shorten("a\nb") == r"'a\nb'"
    assert shorten(list(range(1000))).endswith("...")
    assert len(shorten("word " * 100)) == 80


def test_text_that_looks_like_a_number_is_quoted() -> None:
    assert shorten("3") == "'3'"
    assert shorten("mean") == "mean"


def test_nearest_offers_only_what_is_near() -> None:
    assert nearest("hiden", ["hidden", "layers"]) == "; did you mean hidden?"
    assert nearest("zzz", ["hidden", "layers"]) == ""


def test_an_error_carries_all_its_problems() -> None:
    error = InvalidInput([Problem("a", "one"), Problem("b", "two")])
    assert [problem.path for problem in error.problems] == ["a", "b"]
    assert str(error) == "a: one\nb: two"
    assert TrainerError("plain").problems == (Problem("", "plain"),)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (TrainerError, 1),
        (InvalidInput, 2),
        (NotFound, 3),
        (Conflict, 4),
        (Unreachable, 5),
        (PlacementError, 6),
        (Diverged, 7),
        (CommunicationFailed, 1),
    ],
)
def test_every_kind_ends_with_its_documented_code(kind: type[TrainerError], code: int) -> None:
    assert kind("x").exit_code == ExitCode(code)
