"""What each launcher tells a rank, and which communicator `auto` then means."""

from __future__ import annotations

import pytest

from horovod_trainer.comm.backends import Kind, choose
from horovod_trainer.comm.torch_backend import meeting_place
from horovod_trainer.comm.waiting import reason, wait_for
from horovod_trainer.errors import InvalidInput
from horovod_trainer.launchers import launcher_local_rank, launcher_rank, promised_size, under_launcher, under_torchrun

HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "rank", "local", "size"),
    [
        (HOROVOD, 3, 1, 8),
        (OPEN_MPI, 2, 0, 4),
        (TORCHRUN, 5, 2, 6),
        (HOROVOD | OPEN_MPI, 3, 1, 8),  # horovodrun --mpi
        (OPEN_MPI | TORCHRUN, 2, 0, 4),
        ({}, 0, 0, None),
        ({"RANK": "3"}, 0, 0, None),  # anybody's word
        ({"WORLD_SIZE": "3"}, 0, 0, None),
        ({"RANK": "x", "WORLD_SIZE": "3"}, 0, 0, None),
        ({"HOROVOD_RANK": "", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 0, 2),
    ],
)
def test_rank_and_size(environment: dict[str, str], rank: int, local: int, size: int | None) -> None:
    assert launcher_rank(environment) == rank
    assert launcher_local_rank(environment) == local
    promise = promised_size(environment)
    assert (promise[0] if promise else None) == size
    assert under_launcher(environment) == (size is not None)


@pytest.mark.parametrize(
    ("kind", "environment", "chosen"),
    [
        ("auto", {}, "solo"),
        ("auto", HOROVOD, "horovod"),
        ("auto", OPEN_MPI, "horovod"),
        ("auto", TORCHRUN, "torch"),
        ("mpi", TORCHRUN, "mpi"),
        ("solo", OPEN_MPI, "solo"),
    ],
)
def test_what_auto_means(kind: Kind, environment: dict[str, str], chosen: str) -> None:
    assert choose(kind, environment) == chosen
    assert under_torchrun(environment) == (environment is TORCHRUN)


def test_where_torchs_ranks_meet() -> None:
    assert meeting_place(TORCHRUN) == TORCHRUN
    place = meeting_place({**OPEN_MPI, "MASTER_ADDR": "b", "MASTER_PORT": "2"})
    assert (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) == ("2", "4", "0", "2")
    with pytest.raises(InvalidInput, match="needs MASTER_PORT in the environment"):
        meeting_place({**TORCHRUN, "MASTER_PORT": ""})
    with pytest.raises(InvalidInput, match="start it by torchrun or mpirun"):
        meeting_place(HOROVOD)


def test_a_wait_ends_when_it_is_over() -> None:
    answers = iter([False, False, True])
    wait_for(lambda: next(answers))
    assert next(answers, None) is None


def test_the_first_line_is_the_reason() -> None:
    assert reason(ValueError("\n first \nsecond")) == "first"
    assert reason(KeyError()) == "KeyError"
