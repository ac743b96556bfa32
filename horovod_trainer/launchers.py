"""What launchers tell the processes they start about their rank (L0)."""

from __future__ import annotations

import os
from collections.abc import Mapping

# the most specific first; torchrun's RANK is a common word, and counts only beside WORLD_SIZE
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


def launcher_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank as its launcher says; 0 outside one."""
    for name in RANK_VARIABLES:
        if environment.get(name, "").isdecimal() and (name != "RANK" or "WORLD_SIZE" in environment):
            return int(environment[name])
    return 0


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of its ranks."""
    return any(name in environment and (name != "RANK" or "WORLD_SIZE" in environment) for name in RANK_VARIABLES)
