"""How long a data-parallel step takes on p ranks: an alpha-beta model of its allreduce beside measured compute (pure).

A message of n bytes over a link takes alpha + n / beta (Hockney 1994). A ring allreduce sends 2 (p - 1) messages of n / p
bytes one after the other (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in
MPICH"; Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations": no algorithm moves
fewer bytes). The hierarchical one reduce-scatters inside each node, runs rings across nodes and gathers inside again (Jia
et al. 2018, "Highly scalable deep learning training system with mixed-precision"). Not counted: the additions, far below
the wire's time, and what Horovod's ranks ask each other before, which grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from scipy.optimize import nnls

GRID = 4_000  # midpoints of the integral in `expected_slowest`: within 0.1 % at 512 ranks


@dataclass(frozen=True)
class Link:
    """What one message pays: alpha seconds, and its bytes at beta bytes per second."""

    name: str
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if self.alpha < 0 or not self.beta > 0:
            raise ValueError(f"link {self.name}: latency must not be negative, bandwidth must be positive")


@dataclass(frozen=True)
class Sample:
    """One measured allreduce. sent: bytes that crossed the loopback device meanwhile, of all ranks, headers included."""

    ranks: int
    nbytes: int
    seconds: float
    sent: float = 0.0


@dataclass(frozen=True)
class Fit:
    """overhead: seconds that every allreduce pays whatever is sent (the framework's cycle); link: what the ring pays."""

    overhead: float
    link: Link

    def seconds(self, ranks: int, nbytes: float) -> float:
        """Return the seconds of an allreduce; a world of one does none."""
        return 0.0 if ranks == 1 else self.overhead + ring(ranks, nbytes, self.link)


@dataclass(frozen=True)
class Work:
    """What a step computes: seconds of a micro-batch (mean, standard deviation over them) and of what every rank repeats.

    repeated: optimizer and bookkeeping, once per step on each rank, however many there are.
    """

    micro_batch: float
    deviation: float
    repeated: float

    def seconds(self, micro_batches: float, ranks: int) -> float:
        """Return the expected seconds until the slowest of `ranks` ranks has done `micro_batches` each."""
        slowest = expected_slowest(ranks) * self.deviation * math.sqrt(micro_batches)
        return micro_batches * self.micro_batch + slowest + self.repeated


def ring(ranks: int, nbytes: float, link: Link) -> float:
    """Return 2 (p - 1) alpha + 2 (p - 1) / p n / beta."""
    _check(ranks, nbytes)
    return 2 * (ranks - 1) * link.alpha + 2 * (ranks - 1) / ranks * nbytes / link.beta


def hierarchical(nodes: int, per_node: int, nbytes: float, inside: Link, between: Link) -> float:
    """Return the seconds of reduce-scatter and allgather inside nodes, and of the rings between nodes in the middle.

    Each of a node's ranks runs a ring of n / per_node bytes at the same time, and they share the node's link: together
    they take as long as one ring of n bytes over it.
    """
    _check(nodes, nbytes)
    return ring(per_node, nbytes, inside) + ring(nodes, nbytes, between)


def wire_bytes(ranks: int, nbytes: float) -> float:
    """Return the bytes that each rank sends in a ring allreduce of n bytes: 2 (p - 1) / p n."""
    _check(ranks, nbytes)
    return 2 * (ranks - 1) / ranks * nbytes


def fit_ring(samples: Sequence[Sample]) -> Fit:
    """Return the non-negative overhead, alpha and 1 / beta with the least squared relative error on the samples.

    With a single number of ranks overhead and alpha cannot be told apart: all that does not grow with n is overhead,
    which stays when the link is replaced. Raises ValueError where no sample has two ranks or more.
    """
    useful = [sample for sample in samples if sample.ranks > 1]
    if not useful:
        raise ValueError("a fit needs an allreduce of at least two ranks")
    steps = [2.0 * (sample.ranks - 1) for sample in useful]
    if len(set(steps)) == 1:
        steps = [0.0] * len(steps)
    moved = [wire_bytes(sample.ranks, sample.nbytes) for sample in useful]
    seconds = np.array([sample.seconds for sample in useful])
    terms = np.column_stack([np.ones(len(useful)), steps, moved]) / seconds[:, None]
    scale = np.maximum(terms.max(0), 1e-300)  # bytes and seconds are many orders of magnitude apart
    solution, _ = nnls(terms / scale, np.ones(len(useful)))
    overhead, alpha, per_byte = (float(value) for value in solution / scale)
    return Fit(overhead, Link("measured", alpha, 1 / per_byte if per_byte > 0 else math.inf))


@cache
def expected_slowest(ranks: int) -> float:
    """Return by how many standard deviations the slowest of p equal, independent, normal ranks is expected to be late.

    The expected maximum of p standard normals: the integral over u in (0, 1) of the normal quantile of u^(1 / p).
    """
    if ranks < 1:
        raise ValueError(f"a world has at least one rank, not {ranks}")
    if ranks == 1:
        return 0.0
    quantile = NormalDist().inv_cdf
    return sum(quantile(((i + 0.5) / GRID) ** (1 / ranks)) for i in range(GRID)) / GRID


def error_percent(predicted: float, measured: float) -> float:
    """Return 100 (predicted - measured) / measured."""
    return 100 * (predicted - measured) / measured


def _check(ranks: int, nbytes: float) -> None:
    if ranks < 1 or nbytes < 0:
        raise ValueError(f"want at least one rank and no negative bytes, got {ranks} and {nbytes}")
