"""Features of a micro-batch's nodes, and the exact first-hop neighbourhood term without its target pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.exclusion import Exclusion, excluded_positions, most_partners, offset_left
from horovod_trainer.data.sampler import Graph
from horovod_trainer.jit import compiled, inlined
from horovod_trainer.prefetch import prefetch

Aggregator = Literal["mean", "sum", "max"]

_AHEAD = 8  # neighbours between asking for a row and adding it: about 0.4 microseconds
_LINE = 64  # bytes of a cache line

# numba has no float16 on CPU: kernels read its bits and look up which of the 65,536 values they are
_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def readable(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Return what `value_at` reads in kernels: (float16's bits, its values), or any other array as it is and None."""
    return (values.view(np.uint16), _HALF) if values.dtype == np.float16 else (values, None)


@inlined
def value_at(values: Any, half: Any, row: Any, column: Any) -> Any:
    """Return float32 values[row, column] of a `readable` array."""
    if half is None:  # numba prunes the branch that does not apply
        return np.float32(values[row, column])
    else:
        return half[values[row, column]]


@dataclass(frozen=True)
class Features:
    """Node inputs [N, F] and, per node, the sum (and maximum) of the inputs of all its neighbours, float32 [N, F]."""

    values: NDArray[Any]
    neighbour_sum: NDArray[np.float32] | None = None
    neighbour_max: NDArray[np.float32] | None = None

    @classmethod
    def constant(cls, graph: Graph) -> Features:
        """Return the input that is 1 everywhere: its neighbour sum is the degree."""
        degree = np.diff(graph.indptr).astype(np.float32)[:, None]
        ones = np.ones_like(degree)
        return cls(ones, degree, np.minimum(degree, ones))

    @property
    def width(self) -> int:
        """Number of input features F."""
        return int(self.values.shape[1])

    def rows(self, nodes: NDArray[np.int32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the inputs of `nodes`: float32 [n, F], in `out` when given."""
        out = np.empty((len(nodes), self.width), np.float32) if out is None else out
        _gather(*readable(self.values), nodes, out)
        return out

    def neighbourhood(
        self, graph: Graph, nodes: NDArray[np.int32], exclusion: Exclusion, aggregator: Aggregator
    ) -> NDArray[np.float32]:
        """Return the aggregate of all neighbours' inputs but the excluded ones: float32 [n, F], 0 when none is left.

        Sum and mean take the excluded inputs off the stored sum, or add up what is left where that is less; max is
        recomputed where something is excluded.
        """
        out = np.empty((len(nodes), self.width), np.float32)
        self._write_neighbourhood(graph, nodes, exclusion, aggregator, out, 0)
        return out

    def both(
        self, graph: Graph, nodes: NDArray[np.int32], exclusion: Exclusion, aggregator: Aggregator,
        out: NDArray[np.float32] | None = None, first: int = 0,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Return `rows` and `neighbourhood` side by side, float32 [n, 2F]: layer 1 is one product with them.

        first: the local id of nodes[0], by which the exclusion knows them.
        """
        out = np.empty((len(nodes), 2 * self.width), np.float32) if out is None else out
        _gather(*readable(self.values), nodes, out)
        self._write_neighbourhood(graph, nodes, exclusion, aggregator, out, self.width, first)
        return out

    def _write_neighbourhood(
        self, graph: Graph, nodes: NDArray[np.int32], exclusion: Exclusion, aggregator: Aggregator,
        out: NDArray[np.float32], column: int, first: int = 0,
    ) -> None:  # fmt: skip
        """Write to out[:, column : column + F] (a slice of columns as argument would cost the kernels their vectors)."""
        stored = self.neighbour_max if aggregator == "max" else self.neighbour_sum
        if stored is None:
            raise ValueError(f"the store holds no neighbour aggregate for {aggregator}")
        scratch = np.empty(most_partners(exclusion), np.int64)
        kernel = _first_hop_max if aggregator == "max" else _first_hop_sum
        kernel(
            graph.indptr, graph.indices, *readable(self.values), stored, nodes, exclusion.indptr,
            exclusion.partners, aggregator == "mean", scratch, out, column, first,
        )  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """What layer 1 reads of a micro-batch's `nodes`, [n, 2F] as in `Features.both`, gathered in parts when it is read.

    For a micro-batch of three hops the whole would be the largest block in memory, and twice with one sampled ahead.
    """

    features: Features
    graph: Graph
    nodes: NDArray[np.int32]
    exclusion: Exclusion
    aggregator: Aggregator

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.nodes), 2 * self.features.width

    def part(self, first: int, last: int, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return rows first .. last - 1, float32 [last - first, 2F], in `out` when given."""
        nodes = self.nodes[first:last]
        return self.features.both(self.graph, nodes, self.exclusion, self.aggregator, out, first)


def aggregate_range(
    graph: Graph, h: NDArray[Any], first: int, last: int, aggregator: Aggregator
) -> NDArray[np.float32]:
    """Return the aggregated neighbourhoods of nodes first .. last-1 from all rows h [N, D]: float32 [last - first, D].

    Sums run in float64: hubs have many terms, and training subtracts from what is stored.
    """
    year = graph.year if graph.not_later and graph.year is not None else np.zeros(0, np.int32)
    out = np.empty((last - first, h.shape[1]), np.float32)
    kind = {"sum": 0, "mean": 1, "max": 2}[aggregator]
    _aggregate_range(graph.indptr, graph.indices, year, *readable(h), first, kind, out)
    return out


@compiled
def _aggregate_range(indptr: Any, indices: Any, year: Any, h: Any, half: Any, first: Any, kind: Any, out: Any) -> None:
    total = np.empty(out.shape[1], np.float64)
    row_bytes = h.shape[1] * h.itemsize
    for i in range(out.shape[0]):
        node = first + i
        used = 0
        total[:] = 0.0
        for e in range(indptr[node], indptr[node + 1]):
            if e + _AHEAD < indices.shape[0]:
                for byte in range(0, row_bytes, _LINE):
                    prefetch(h, indices[e + _AHEAD], byte)
            neighbour = indices[e]
            if year.shape[0] > 0 and year[neighbour] > year[node]:
                continue
            used += 1
            for f in range(out.shape[1]):
                value = value_at(h, half, neighbour, f)
                if kind == 2:
                    total[f] = value if used == 1 else max(total[f], value)
                else:
                    total[f] += value
        scale = 1.0 / used if kind == 1 and used > 0 else 1.0
        for f in range(out.shape[1]):
            out[i, f] = total[f] * scale


@compiled
def _gather(values: Any, half: Any, nodes: Any, out: Any) -> None:
    for i in range(nodes.shape[0]):
        node = nodes[i]
        for f in range(values.shape[1]):
            out[i, f] = value_at(values, half, node, f)


@compiled
def _first_hop_sum(
    indptr: Any, indices: Any, values: Any, half: Any, stored: Any, nodes: Any, ex_indptr: Any, ex_partners: Any,
    mean: Any, scratch: Any, out: Any, column: Any, first: Any,
) -> None:  # fmt: skip
    width, column = values.shape[1], max(column, 0)  # numba then sees that no index is negative: four times as fast
    for i in range(nodes.shape[0]):
        node = max(nodes[i], 0)
        start, stop = indptr[node], indptr[node + 1]
        num_excluded = 0
        if (
            first + i + 1 < ex_indptr.shape[0]
        ):  # an endpoint of a target pair; asked here, the call is saved for all others
            num_excluded = excluded_positions(indices, start, stop, first + i, ex_indptr, ex_partners, scratch)
        left = stop - start - num_excluded
        scale = np.float32(1.0) / np.float32(left) if mean and left > 0 else np.float32(1.0)
        if left == 0:  # exactly zero, not what rounding leaves of a subtraction
            for f in range(width):
                out[i, column + f] = np.float32(0)
        elif num_excluded == 0:  # nearly all nodes: one pass
            for f in range(width):
                out[i, column + f] = stored[node, f] * scale
        elif num_excluded > left:  # what is left is the shorter sum, and free of cancellation
            for f in range(width):
                out[i, column + f] = np.float32(0)
            for entry in range(left):
                neighbour = indices[start + offset_left(entry, scratch, num_excluded)]
                for f in range(width):
                    out[i, column + f] += value_at(values, half, neighbour, f)
            for f in range(width):
                out[i, column + f] *= scale
        else:
            for f in range(width):
                out[i, column + f] = stored[node, f]
            for e in range(num_excluded):
                partner = indices[start + scratch[e]]
                for f in range(width):
                    out[i, column + f] -= value_at(values, half, partner, f)
            for f in range(width):
                out[i, column + f] *= scale


@compiled
def _first_hop_max(
    indptr: Any, indices: Any, values: Any, half: Any, stored: Any, nodes: Any, ex_indptr: Any, ex_partners: Any,
    mean: Any, scratch: Any, out: Any, column: Any, first: Any,
) -> None:  # fmt: skip
    for i in range(nodes.shape[0]):
        node = nodes[i]
        start, stop = indptr[node], indptr[node + 1]
        num_excluded = excluded_positions(indices, start, stop, first + i, ex_indptr, ex_partners, scratch)
        if num_excluded == 0:
            for f in range(values.shape[1]):
                out[i, column + f] = stored[node, f]
            continue
        left = stop - start - num_excluded
        for f in range(values.shape[1]):
            out[i, column + f] = np.float32(0) if left == 0 else np.float32(-np.inf)
        for entry in range(left):
            neighbour = indices[start + offset_left(entry, scratch, num_excluded)]
            for f in range(values.shape[1]):
                out[i, column + f] = max(out[i, column + f], value_at(values, half, neighbour, f))
