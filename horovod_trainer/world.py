"""Is this the world that was promised, and do all its ranks mean the same run? Asked before any step is taken."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping

from horovod_trainer.comm.base import Communicator, gather_text
from horovod_trainer.config import LaunchSection
from horovod_trainer.cores import cpu_quota
from horovod_trainer.errors import Conflict, PlacementError, Problem, shorten


def check_placement(comm: Communicator, launch: LaunchSection) -> Counter[str]:
    """Return ranks per host; raises PlacementError, on every rank, when size or distinct hosts are not as promised."""
    hosts = Counter(gather_text(comm, comm.host))
    placed = ", ".join(f"{host} x {ranks}" for host, ranks in sorted(hosts.items()))
    problems = []
    if launch.expected_size is not None and comm.size != launch.expected_size:
        message = f"the launcher promised {launch.expected_size} ranks, the world has {comm.size}: {placed}"
        problems.append(Problem("launch.expected_size", message, comm.size))
    if launch.expected_hosts is not None and len(hosts) != launch.expected_hosts:
        message = (
            f"the launcher promised {launch.expected_hosts} distinct hosts, ranks run on {len(hosts)}: {placed}; "
            "with Open MPI 5 under the MPI operator the host file is ignored, use 4.1 or pass --hostfile"
        )
        problems.append(Problem("launch.expected_hosts", message, len(hosts)))
    if problems:
        raise PlacementError(problems, agreed=True)
    return hosts


def threads_per_rank(comm: Communicator) -> int:
    """Return this rank's share of the cores that its host's ranks may use: min(cgroup quota, affinities) / ranks.

    A launcher may bind every rank to cores of its own, so the affinities of a host's ranks are put together first.
    """
    mine = os.sched_getaffinity(0)
    everyone = [text.split() for text in gather_text(comm, " ".join([comm.host, *map(str, sorted(mine))]))]
    local = [set(cores) for host, *cores in everyone if host == comm.host]
    cores = min(float(len(set[str]().union(*local))), cpu_quota() or float("inf"))
    return max(1, min(len(mine), int(cores / len(local))))


def check_agreement(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Raise Conflict, on every rank, naming each fact in which some rank differs from rank 0, and that rank."""
    everyone = [json.loads(text) for text in gather_text(comm, json.dumps(facts, sort_keys=True, default=str))]
    problems = []
    for name in sorted(facts):
        odd = [rank for rank, said in enumerate(everyone) if said.get(name) != everyone[0].get(name)]
        if odd:
            theirs = shorten(everyone[odd[0]].get(name))
            message = f"rank {odd[0]} has {theirs}, rank 0 has {shorten(everyone[0].get(name))}"
            more = f" ({len(odd)} of {comm.size} ranks differ from rank 0)" if len(odd) > 1 else ""
            problems.append(Problem(name, f"the ranks do not agree: {message}{more}"))
    if problems:
        raise Conflict(problems, agreed=True)
