"""Placement and agreement: refused on every rank, with everything that is wrong in one error."""

from __future__ import annotations

import pytest

from horovod_trainer.comm.base import Communicator, Solo, ThreadWorld, gather_text
from horovod_trainer.config import LaunchSection
from horovod_trainer.errors import Conflict, ExitCode, PlacementError
from horovod_trainer.launchers import promised_size
from horovod_trainer.world import check_agreement, check_placement


def test_the_promised_world_is_accepted() -> None:
    launch = LaunchSection(expected_size=4, expected_hosts=2)
    placed = ThreadWorld(4, ["a", "a", "b", "b"]).run(lambda comm: check_placement(comm, launch))
    assert placed == [{"a": 2, "b": 2}] * 4


def test_one_host_instead_of_four_is_refused_everywhere() -> None:
    launch = LaunchSection(expected_size=8, expected_hosts=4)

    def refused(comm: Communicator) -> PlacementError:
        with pytest.raises(PlacementError) as caught:
            check_placement(comm, launch)
        return caught.value

    for error in ThreadWorld(2, ["w0", "w0"]).run(refused):
        assert error.exit_code == ExitCode.PLACEMENT
        assert error.agreed
        assert [problem.path for problem in error.problems] == ["launch.expected_size", "launch.expected_hosts"]
        assert "w0 x 2" in str(error)


def test_disagreement_names_the_fact_the_rank_and_both_values() -> None:
    def steps(comm: Communicator) -> str:
        facts = {"steps per epoch": 5 if comm.rank < 2 else 3, "torch": "2.13.0"}
        with pytest.raises(Conflict) as caught:
            check_agreement(comm, facts)
        return str(caught.value)

    for sentence in ThreadWorld(3).run(steps):
        assert sentence == "steps per epoch: the ranks do not agree: rank 2 has 3, rank 0 has 5"


def test_agreement_is_silent() -> None:
    ThreadWorld(3).run(lambda comm: check_agreement(comm, {"steps": 5}))
    check_agreement(Solo(), {"steps": 5})


def test_texts_of_any_length_travel() -> None:
    texts = ["", "ünïcode", "x" * 300]
    assert ThreadWorld(3).run(lambda comm: gather_text(comm, texts[comm.rank])) == [texts] * 3


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, 8),
        ({"HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "8"}, 2),
        ({"PMI_SIZE": "x"}, None),
    ],
)
def test_what_the_launcher_says(environment: dict[str, str], size: int | None) -> None:
    promise = promised_size(environment)
    assert (promise[0] if promise else None) == size
