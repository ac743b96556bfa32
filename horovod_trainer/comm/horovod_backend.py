"""Horovod behind the Communicator protocol: the only file that imports it, and only when asked."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from horovod_trainer.comm.base import Reduction
from horovod_trainer.comm.waiting import collective_failed, wait_for
from horovod_trainer.errors import InvalidInput, Problem

STALL_SECONDS = "600"  # longer than one rank can be ahead of another in an evaluation
# Horovod's threads wake every cycle to ask each other for work: at its default of 1 ms that takes 4 % of the core a rank
# computes on. A collective then starts up to a cycle later, a time in which the sampler goes on (docs/performance.md).
CPU_CYCLE_MS = "5"


class HorovodCommunicator:
    """Collectives of Horovod. One allreduce a step on one flat tensor: nothing is fused, so runs repeat bit for bit."""

    name = "horovod"

    def __init__(self) -> None:
        try:
            import horovod.torch as hvd
        except ImportError as failure:
            raise InvalidInput(
                Problem("train.communicator", f"Horovod cannot be imported ({failure}); `make setup` builds it")
            ) from None
        # ranks that wait in different collectives end the job instead of hanging; the user's own value wins
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", STALL_SECONDS)
        if not torch.cuda.is_available():
            os.environ.setdefault("HOROVOD_CYCLE_TIME", CPU_CYCLE_MS)
        hvd.init()
        self._hvd: Any = hvd
        self._ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())
        self.host = socket.gethostname()
        self._calls = 0

    def _name(self, what: str) -> str:
        """Return a name that is new on this rank and the same on all: ranks that disagree on the order are told apart."""
        self._calls += 1
        return f"{what}.{self._calls}"

    def _call(self, start: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a collective that `start` begins."""
        try:
            handle = start(*args, **kwargs)
            wait_for(lambda: bool(self._hvd.poll(handle)))
            return self._hvd.synchronize(handle)
        except self._hvd.HorovodInternalError as failure:
            raise collective_failed(self, failure) from None

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce in place; Horovod ends when one rank does."""
        if self.size > 1:
            self._call(self._hvd.allreduce_async_, tensor, op=self._ops[op], name=f"{op}.{tensor.numel()}")
        return tensor

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite the tensors with those of `root`."""
        for tensor in tensors:
            self._call(self._hvd.broadcast_async_, tensor, root, name=self._name("broadcast"))

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor; the row counts travel first."""
        rows = self._call(self._hvd.allgather_async, torch.tensor([len(tensor)]), name=self._name("rows"))
        whole = self._call(self._hvd.allgather_async, tensor, name=self._name("allgather"))
        return list(torch.split(whole, rows.tolist()))

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._call(self._hvd.allreduce_async, torch.zeros(1), name=self._name("barrier"))

    def close(self) -> None:
        """Shut Horovod down with all ranks."""
        self._hvd.shutdown()
