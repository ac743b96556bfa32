"""MPI behind the Communicator protocol, by mpi4py: the only file that imports it, and only when asked.

The reductions of one tensor by MPI repeat bit for bit on the same ranks, as Horovod's do; it is here to compare with,
and for clusters that have an MPI and no Horovod.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_trainer.comm.base import Reduction
from horovod_trainer.comm.waiting import collective_failed, reason, wait_for
from horovod_trainer.errors import InvalidInput, Problem


def world() -> Any:
    """Return mpi4py's MPI module; raises InvalidInput when it cannot be imported, or finds no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as failure:
        message = f"mpi4py cannot be imported ({reason(failure)}); pip install -c constraints.txt mpi4py"
        raise InvalidInput(Problem("train.communicator", message)) from None
    return MPI


class MpiCommunicator:
    """Collectives of MPI on host memory; tensors of a GPU are copied there and back."""

    name = "mpi"

    def __init__(self) -> None:
        self._mpi = world()
        self._comm = self._mpi.COMM_WORLD
        self._ops = {"sum": self._mpi.SUM, "max": self._mpi.MAX, "min": self._mpi.MIN}
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        mates = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = int(mates.Get_rank()), int(mates.Get_size())
        mates.Free()
        self.host = socket.gethostname()

    def _call(self, start: Any, *args: Any, **kwargs: Any) -> None:
        """Return when the non-blocking collective that `start` begins is done."""
        try:
            request = start(*args, **kwargs)
            wait_for(lambda: bool(request.Test()))
        except self._mpi.Exception as failure:
            raise collective_failed(self, failure) from None

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce in place."""
        if self.size > 1:
            array = _array(tensor)
            self._call(self._comm.Iallreduce, self._mpi.IN_PLACE, array, op=self._ops[op])
            _put(array, tensor)
        return tensor

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite the tensors with those of `root`."""
        for tensor in tensors:
            array = _array(tensor)
            self._call(self._comm.Ibcast, array, root=root)
            _put(array, tensor)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor; the row counts travel first."""
        own = _array(tensor)
        rows = np.zeros(self.size, np.int64)
        self._call(self._comm.Iallgather, np.array([len(own)], np.int64), rows)
        width = own[:1].size if len(own) else int(np.prod(own.shape[1:]))
        counts = rows * width
        out = np.empty((int(rows.sum()), *own.shape[1:]), own.dtype)
        layout = [out, counts, np.concatenate([[0], np.cumsum(counts)[:-1]]), _type_of(self._mpi, own)]
        self._call(self._comm.Iallgatherv, [own, own.size, _type_of(self._mpi, own)], layout)
        return list(torch.split(torch.from_numpy(out).to(tensor.device), rows.tolist()))

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._call(self._comm.Ibarrier)

    def close(self) -> None:
        """Finalise MPI with all ranks."""
        self._mpi.Finalize()


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's memory, or a copy of it on the host."""
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _put(array: NDArray[Any], tensor: torch.Tensor) -> None:
    """Bring a host copy back to where the tensor is."""
    if tensor.device.type != "cpu":
        tensor.detach().copy_(torch.from_numpy(array))


def _type_of(mpi: Any, array: NDArray[Any]) -> Any:
    return mpi._typedict[array.dtype.char]
