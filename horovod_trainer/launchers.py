"""What launchers tell the processes they start about their place in the world (L0)."""

from __future__ import annotations

import os
from collections.abc import Mapping

# the most specific first; torchrun's are common words, and count only together
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
LOCAL_RANK_VARIABLES = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")


def launcher_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank as its launcher says; 0 outside one."""
    return _first(RANK_VARIABLES, environment)[0]


def launcher_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's number among its host's ranks as its launcher says; 0 outside one."""
    return _first(LOCAL_RANK_VARIABLES, environment)[0]


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of its ranks."""
    return bool(_first(RANK_VARIABLES, environment)[1])


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether that launcher is torchrun."""
    return _first(RANK_VARIABLES, environment)[1] == "RANK"


def promised_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return (world size, variable) that the launcher put into the environment, or None outside a launcher."""
    size, name = _first(SIZE_VARIABLES, environment)
    return (size, name) if name else None


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the first of the variables that holds a number, and its name; 0 and an empty name without one."""
    torchruns = environment.get("RANK", "").isdecimal() and environment.get("WORLD_SIZE", "").isdecimal()
    for name in names:
        if environment.get(name, "").isdecimal() and (torchruns or name != names[-1]):
            return int(environment[name]), name
    return 0, ""
