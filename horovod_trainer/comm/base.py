"""What ranks say to each other: the protocol, a world of one, and a world of threads for tests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch

from horovod_trainer.errors import TrainerError, of_exit_code

Reduction = Literal["sum", "max", "min"]
T = TypeVar("T")


class Communicator(Protocol):
    """Collectives over `size` ranks; every rank calls them in the same order. Tensors are contiguous."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce in place, bit-identical on all ranks and runs: one tensor, one collective, never fused with another."""

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite the tensors with those of `root`."""

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank; first dimensions may differ."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def close(self) -> None:
        """Leave the world in good order."""


def gather_text(comm: Communicator, text: str) -> list[str]:
    """Return every rank's text, by rank."""
    encoded = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    return [bytes(part.tolist()).decode().rstrip("\0") for part in comm.allgather(encoded)]


def broadcast_text(comm: Communicator, text: str, root: int = 0) -> str:
    """Return the text of rank `root`, on every rank; what others pass is ignored."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)])
    comm.broadcast_([length], root)
    content = torch.zeros(int(length[0]) + 1, dtype=torch.uint8)  # one more: some backends refuse an empty tensor
    if comm.rank == root:
        content[:-1] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
    comm.broadcast_([content], root)
    return bytes(content[:-1].tolist()).decode()


def on_rank_0(comm: Communicator, function: Callable[[], Any]) -> Any:
    """Return, on every rank, what function() returned on rank 0, where alone it runs: JSON values.

    Its TrainerError or OSError is raised on every rank, so that none waits for a rank 0 that has given up.
    """
    outcome: dict[str, Any] = {}
    failure: TrainerError | OSError | None = None
    if comm.rank == 0:
        try:
            outcome = {"value": function()}
        except TrainerError as error:
            failure, outcome = error, {"exit_code": int(error.exit_code)}
        except OSError as error:
            failure, outcome = error, {"exit_code": 1}
    said = json.loads(broadcast_text(comm, json.dumps(outcome)))
    if failure is not None:
        raise failure
    if "exit_code" in said:
        raise of_exit_code(said["exit_code"])("rank 0 could not go on", agreed=True)
    return said["value"]


class Solo:
    """A world of one: every collective is the identity."""

    name = "solo"
    rank = local_rank = 0
    size = local_size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Do nothing."""

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return [tensor]."""
        return [tensor]

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


class ThreadWorld:
    """R ranks as threads of this process: the real collective semantics, small enough for property tests."""

    def __init__(self, size: int, hosts: Sequence[str] | None = None, timeout: float = 120.0) -> None:
        self.size = size
        self.hosts = list(hosts or ["here"] * size)
        self.slots: list[Sequence[torch.Tensor]] = [[]] * size
        self._barrier = threading.Barrier(size, timeout=timeout)

    def exchange(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return what every rank put in, copied."""
        self._barrier.wait()
        self.slots[rank] = [tensor.detach().clone() for tensor in tensors]
        self._barrier.wait()
        return list(self.slots)

    def run(self, function: Callable[[Communicator], T]) -> list[T]:
        """Return function(communicator) of every rank; the first rank's error is raised once all have ended."""
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = function(_Thread(self, rank))
            except BaseException as failure:  # raised again below, in the caller's thread
                failures.append(failure)
                self._barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [failure for failure in failures if not isinstance(failure, threading.BrokenBarrierError)]
        if failures:
            raise (causes or failures)[0]
        return [results[rank] for rank in range(self.size)]


class _Thread:
    name = "threads"

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.host = world.hosts[rank]
        mates = [other for other, host in enumerate(world.hosts) if host == self.host]
        self.local_rank, self.local_size = mates.index(rank), len(mates)

    def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        parts = torch.stack([part[0] for part in self._world.exchange(self.rank, [tensor])])
        reduced = parts.sum(0) if op == "sum" else parts.amax(0) if op == "max" else parts.amin(0)
        return tensor.copy_(reduced)

    def broadcast_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        received = self._world.exchange(self.rank, tensors)[root]
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part[0] for part in self._world.exchange(self.rank, [tensor])]

    def barrier(self) -> None:
        self._world.exchange(self.rank, [])

    def close(self) -> None:
        pass
