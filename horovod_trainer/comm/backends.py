"""Which communicator this process uses; the libraries behind them are imported only when one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from horovod_trainer.comm.base import Communicator, Solo
from horovod_trainer.errors import PlacementError, Problem
from horovod_trainer.launchers import promised_size, under_torchrun

Kind = Literal["auto", "horovod", "mpi", "torch", "solo"]


def choose(kind: Kind, environment: Mapping[str, str]) -> Kind:
    """Return the kind that auto means: torch under torchrun, horovod under other launchers, solo without one."""
    if kind != "auto":
        return kind
    if under_torchrun(environment):
        return "torch"
    return "horovod" if promised_size(environment) is not None else "solo"


def open_communicator(kind: Kind) -> Communicator:
    """Return the communicator of this process.

    Raises PlacementError when the world is not of the size the launcher said (a library without that launcher's
    controller makes every rank a world of one), InvalidInput when the library cannot be imported or found its world.
    """
    promise = promised_size(os.environ)
    chosen = choose(kind, os.environ)
    if chosen == "solo":
        if promise is not None and promise[0] > 1:
            raise PlacementError(
                Problem("train.communicator", f"solo, but {promise[1]} says this is one of {promise[0]} ranks")
            )
        return Solo()
    comm = _open(chosen)
    if promise is not None and comm.size != promise[0]:
        fix = "it was built without this launcher's controller (see `horovod_trainer check`)"
        message = f"the launcher started {promise[0]} ranks, {comm.name} sees {comm.size}: {fix}"
        raise PlacementError(Problem(promise[1], message, comm.size))
    return comm


def _open(chosen: Kind) -> Communicator:
    if chosen == "mpi":
        from horovod_trainer.comm.mpi_backend import MpiCommunicator

        return MpiCommunicator()
    if chosen == "torch":
        from horovod_trainer.comm.torch_backend import TorchCommunicator

        return TorchCommunicator()
    from horovod_trainer.comm.horovod_backend import HorovodCommunicator

    return HorovodCommunicator()
