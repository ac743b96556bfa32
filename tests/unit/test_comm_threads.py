"""The worlds tests run on: collectives of Solo and of threads mean what the protocol says."""

from __future__ import annotations

import pytest
import torch

from horovod_trainer.comm.base import Communicator, Reduction, Solo, ThreadWorld, gather_text


@pytest.mark.parametrize(("op", "want"), [("sum", [6.0, 12.0]), ("max", [3.0, 6.0]), ("min", [0.0, 0.0])])
def test_allreduce_reduces_in_place_on_every_rank(op: Reduction, want: list[float]) -> None:
    def rank(comm: Communicator) -> list[float]:
        tensor = torch.tensor([1.0, 2.0]) * comm.rank
        assert comm.allreduce_(tensor, op) is tensor
        return [float(value) for value in tensor]

    assert ThreadWorld(4).run(rank) == [want] * 4


def test_repeated_allreduce_does_not_leak_one_call_into_the_next() -> None:
    def rank(comm: Communicator) -> list[float]:
        return [float(comm.allreduce_(torch.tensor([float(turn * 10 + comm.rank)]))) for turn in range(50)]

    assert ThreadWorld(3).run(rank) == [[turn * 30 + 3.0 for turn in range(50)]] * 3


def test_broadcast_copies_the_roots_values_and_nothing_is_shared() -> None:
    def rank(comm: Communicator) -> list[float]:
        tensors = [torch.full((2,), float(comm.rank)), torch.tensor([10.0 * comm.rank])]
        comm.broadcast_(tensors, root=1)
        tensors[0] += comm.rank
        comm.barrier()
        return [float(tensors[0][0]), float(tensors[1][0])]

    assert ThreadWorld(3).run(rank) == [[1.0, 10.0], [2.0, 10.0], [3.0, 10.0]]


def test_allgather_keeps_ranks_apart_whatever_their_lengths() -> None:
    def rank(comm: Communicator) -> list[int]:
        return [len(part) for part in comm.allgather(torch.zeros(2 * comm.rank, 3))]

    assert ThreadWorld(3).run(rank) == [[0, 2, 4]] * 3


def test_text_arrives_as_it_left() -> None:
    texts = ["", "köln", "a" * 300]
    assert ThreadWorld(3).run(lambda comm: gather_text(comm, texts[comm.rank])) == [texts] * 3
    assert gather_text(Solo(), "host") == ["host"]


def test_local_ranks_count_within_a_host() -> None:
    world = ThreadWorld(4, hosts=["a", "b", "a", "b"])
    assert world.run(lambda comm: (comm.host, comm.local_rank, comm.local_size)) == [
        ("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2),
    ]  # fmt: skip


def test_one_ranks_error_ends_the_others_and_is_the_one_raised() -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            raise LookupError("rank 1 broke")
        comm.barrier()

    with pytest.raises(LookupError, match="rank 1 broke"):
        ThreadWorld(3).run(rank)


def test_solo_is_the_identity() -> None:
    solo = Solo()
    tensor = torch.tensor([1.0, 2.0])
    assert solo.allreduce_(tensor, "max") is tensor
    solo.broadcast_([tensor])
    assert solo.allgather(tensor) == [tensor]
    assert (solo.rank, solo.size, solo.local_rank, solo.local_size) == (0, 1, 0, 1)
    solo.barrier()
    solo.close()
    assert tensor.tolist() == [1.0, 2.0]
