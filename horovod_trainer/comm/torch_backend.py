"""torch.distributed behind the Communicator protocol, so that DDP's users can compare, and torchrun can launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from horovod_trainer.comm.base import Reduction
from horovod_trainer.comm.waiting import collective_failed
from horovod_trainer.errors import InvalidInput, Problem

TIMEOUT_SECONDS = 600.0  # of a collective: longer than one rank can be ahead of another in an evaluation
_OPS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX, "min": distributed.ReduceOp.MIN}


def meeting_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process.

    torchrun sets them; under Open MPI's mpirun the ranks agree on the last two by mpi4py. Raises InvalidInput naming
    what is missing under other launchers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: environment[name] for name in names if environment.get(name)}
    for name in names[:4]:
        if name not in found and f"OMPI_COMM_{_OPEN_MPI[name]}" in environment:
            found[name] = environment[f"OMPI_COMM_{_OPEN_MPI[name]}"]
    if "MASTER_ADDR" not in found and "OMPI_COMM_WORLD_RANK" in environment:
        found |= _agree()
    missing = [name for name in names if name not in found]
    if missing:
        message = f"torch needs {', '.join(missing)} in the environment: start it by torchrun or mpirun"
        raise InvalidInput(Problem("train.communicator", message, "torch"))
    return found


_OPEN_MPI = {
    "RANK": "WORLD_RANK",
    "WORLD_SIZE": "WORLD_SIZE",
    "LOCAL_RANK": "WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "WORLD_LOCAL_SIZE",
}


def _agree() -> dict[str, str]:
    """Return rank 0's host and a port that is free there, the same on every rank of mpirun's world."""
    from horovod_trainer.comm.mpi_backend import world

    comm = world().COMM_WORLD
    place = None
    if comm.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = (socket.gethostname(), str(probe.getsockname()[1]))
    address, port = comm.bcast(place)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


class TorchCommunicator:
    """Collectives of torch.distributed: Gloo for tensors in host memory, NCCL for those of a GPU."""

    name = "torch"

    def __init__(self) -> None:
        place = meeting_place(os.environ)
        self.rank, self.size = int(place["RANK"]), int(place["WORLD_SIZE"])
        self.local_rank, self.local_size = int(place["LOCAL_RANK"]), int(place["LOCAL_WORLD_SIZE"])
        self.host = socket.gethostname()
        self._call(
            distributed.init_process_group,
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{place['MASTER_ADDR']}:{place['MASTER_PORT']}",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, **kwargs)
        except RuntimeError as failure:  # DistBackendError and its kin are of this kind
            raise collective_failed(self, failure) from None

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce in place."""
        if self.size > 1:
            self._call(distributed.all_reduce, tensor.detach(), _OPS[op])
        return tensor

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite the tensors with those of `root`."""
        for tensor in tensors:
            self._call(distributed.broadcast, tensor.detach(), root)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor; the row counts travel first, and rows are padded to the longest on the way."""
        counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(self.size)]
        self._call(distributed.all_gather, counts, torch.tensor([len(tensor)], device=tensor.device))
        rows = [int(count) for count in counts]
        padded = tensor.new_zeros((max(1, *rows), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._call(distributed.all_gather, parts, padded)
        return [part[:count] for part, count in zip(parts, rows, strict=True)]

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._call(distributed.all_reduce, torch.zeros(1))

    def close(self) -> None:
        """Leave the process group with all ranks."""
        distributed.destroy_process_group()
