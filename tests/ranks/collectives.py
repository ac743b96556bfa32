"""Every collective of the communicator named by the first argument, against values worked out by hand, on two ranks."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch

from horovod_trainer.comm.backends import Kind, open_communicator
from horovod_trainer.comm.base import Reduction, broadcast_text, gather_text, on_rank_0
from horovod_trainer.errors import Conflict

comm = open_communicator(cast(Kind, sys.argv[1]))
assert comm.size == 2, comm.size
assert (comm.local_rank, comm.local_size) == (comm.rank, 2)
mine, theirs = comm.rank + 1, 2 - comm.rank

for dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
    for op, expected in (("sum", 3), ("max", 2), ("min", 1)):
        value = torch.tensor([mine, 10 * mine], dtype=dtype)
        assert comm.allreduce_(value, cast(Reduction, op)) is value
        assert value.tolist() == [expected, 10 * expected], (dtype, op, value)

for dtype in (torch.float32, torch.int64, torch.uint8):
    for root in (0, 1):
        tensors = [torch.full((2, 3), mine, dtype=dtype), torch.tensor(7 * mine, dtype=dtype)]  # one without dimensions
        comm.broadcast_(tensors, root)
        assert tensors[0].eq(root + 1).all(), (dtype, root)
        assert int(tensors[1]) == 7 * (root + 1)
    for rows in ((2, 2), (0, 3), (3, 0), (1, 5)):
        parts = comm.allgather(torch.full((rows[comm.rank], 2), mine, dtype=dtype))
        assert [tuple(part.shape) for part in parts] == [(rows[0], 2), (rows[1], 2)]
        assert all(part.eq(number + 1).all() for number, part in enumerate(parts))
assert [part.tolist() for part in comm.allgather(torch.tensor([float(mine)]))] == [[1.0], [2.0]]

assert gather_text(comm, "ä" * comm.rank) == ["", "ä"]
assert broadcast_text(comm, f"of {comm.rank} €", root=1) == "of 1 €"
assert on_rank_0(comm, lambda: {"only": comm.rank}) == {"only": 0}
assert on_rank_0(comm, lambda: None) is None


def refuse() -> Any:
    raise Conflict("rank 0 says no")


with pytest.raises(Conflict) as refused:
    on_rank_0(comm, refuse)
assert refused.value.agreed == (comm.rank == 1)  # rank 0 says it, the others only end

# the same bits from the same numbers, however often: a buffer of the size of a gradient
torch.manual_seed(comm.rank)
source = torch.randn(300_001)
first = comm.allreduce_(source.clone())
assert all(torch.equal(comm.allreduce_(source.clone()), first) for _ in range(10))
gathered = comm.allgather(first)
assert torch.equal(gathered[0], gathered[1])
comm.barrier()
comm.close()
sys.stdout.write(f"{comm.name}: all collectives are right\n")
