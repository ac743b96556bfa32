"""`Recipe.build` on one device: graph, features and edges resident, nothing of a step waits for the host or goes to it.

Which edges are a micro-batch's seeds is a pure function of host integers whose cycle walking has no fixed length: the host
computes these few thousand numbers and sends them through pinned memory, a way the device is never waited for on. With max
and target exclusion the host also counts its endpoints' entries, from its own copy of the row pointers.

The draws are the CPU's to the bit. Sums of float32 on CUDA add in no fixed order (the excluded terms here, gradients of
gathered rows); torch.use_deterministic_algorithms(True) gives them one. It has not run on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_trainer.counters import Stream, derive_key
from horovod_trainer.data.batches import Recipe
from horovod_trainer.data.device_counters import draw_below
from horovod_trainer.data.device_sampler import Excluded, PaddedBlock, Rows, relabel, sample_blocks, upload
from horovod_trainer.data.negatives import Candidates
from horovod_trainer.data.sampler import ALL
from horovod_trainer.errors import InvalidInput, Problem


@dataclass(frozen=True)
class DeviceNegatives:
    """tails: int64 [P, K] or, shared, [K], global ids; valid: bool [P, K]; citing: int64 [], true training edges drawn."""

    tails: Tensor
    valid: Tensor
    shared: bool
    citing: Tensor

    @property
    def drawn(self) -> int:
        """Pairs drawn, P * K."""
        return self.valid.numel()


@dataclass(frozen=True)
class DeviceCandidates:
    """`Candidates` on a device: citations; with years also year int32 [N], by_year int32 [N] and limits int64 [N]."""

    citations: Rows
    year: Tensor | None = None
    by_year: Tensor | None = None
    limits: Tensor | None = None

    @classmethod
    def of(cls, host: Candidates, citations: Rows, device: torch.device) -> DeviceCandidates:
        """Return the candidates, whose citations are resident already."""
        if host.year is None:
            return cls(citations)
        limits = host.up_to[np.asarray(host.year) - host.first_year]
        return cls(citations, upload(host.year, device), upload(host.by_year, device), upload(limits, device))

    def draw(self, source: Tensor, target: Tensor, count: int, shared: bool, key: int) -> DeviceNegatives:
        """Return what `negatives.draw_uniform` or `draw_shared` do, for global ids int64 [P]."""
        limits = torch.full_like(source, self.citations.num_nodes) if self.limits is None else self.limits[source]
        if shared:
            limits = torch.cat([limits, limits.new_ones(1)]).max()[None]
        draws = draw_below(key, limits, count)
        tails = draws if self.by_year is None else self.by_year[draws].long()
        _, citing = self.citations.find(source[:, None], tails)  # a pool [1, K] broadcasts like rows [P, K]
        wrong = citing | (tails == target[:, None]) | (tails == source[:, None])
        if self.year is not None:
            wrong |= self.year[tails] > self.year[source][:, None]
        return DeviceNegatives(tails[0] if shared else tails, ~wrong, shared, citing.sum())


@dataclass(frozen=True)
class DeviceBatch:
    """`MicroBatch` on a device, all ids int64. inputs: float32 [n, F] or [n, 2F], n with padding; count: nodes, int64 []."""

    micro: int
    nodes: Tensor
    count: Tensor
    source: Tensor
    target: Tensor
    tails: Tensor
    negatives: DeviceNegatives
    blocks: list[PaddedBlock]
    inputs: Tensor
    stored_first_hop: bool
    excluded_pairs: Tensor
    dropout_key: int

    def sums(self) -> Tensor:
        """Return float32 [4]: pairs excluded, negatives drawn, masked and citing; in the order they are logged in."""
        valid, drawn = self.negatives.valid, self.negatives.drawn
        drawn_here = torch.full_like(self.excluded_pairs, drawn)  # filled there, not sent there
        return torch.stack([self.excluded_pairs, drawn_here, drawn - valid.sum(), self.negatives.citing]).float()


@dataclass(frozen=True)
class DeviceRecipe:
    """A `Recipe` resident on a device. values, stored: [N+1, F] with a zero row for padding; stored: None when sampled.

    edge_source, edge_target: int32 [E]. citation2 takes about 4.5 GB, half of it the stored neighbour sums and features.
    """

    host: Recipe
    device: torch.device
    graph: Rows
    candidates: DeviceCandidates
    edge_source: Tensor
    edge_target: Tensor
    values: Tensor
    stored: Tensor | None

    @classmethod
    def resident(cls, recipe: Recipe, device: torch.device) -> DeviceRecipe:
        """Return the recipe copied to the device; InvalidInput where a sampled hop takes every neighbour (-1)."""
        if ALL in recipe.hops:
            message = "sampling on a device draws a fixed number of neighbours, never all; name one or set sampler: cpu"
            raise InvalidInput(Problem("sampling.fanouts", message, list(recipe.fanouts)))
        features, kind, host = recipe.features, recipe.stored_first_hop, recipe.candidates
        stored = features.neighbour_max if kind == "max" else features.neighbour_sum
        if kind and (stored is None or recipe.graph.not_later):
            raise ValueError("the stored first hop needs the neighbour aggregate of an unfiltered graph")
        graph = Rows.of_graph(recipe.graph, device)
        citations = graph  # without directions a neighbour is a citation: one copy
        if host.citations is not recipe.graph.indices or recipe.graph.not_later:
            citations = Rows.of(host.citations_indptr, host.citations, device)
        return cls(
            recipe, device, graph, DeviceCandidates.of(host, citations, device), upload(recipe.edge_source, device),
            upload(recipe.edge_target, device), upload(features.values, device, padding=1),
            None if kind is None or stored is None else upload(stored, device, padding=1),
        )  # fmt: skip

    def build(self, epoch: int, step: int, micro: int) -> DeviceBatch:
        """Return micro-batch `micro` of the epoch's step `step`, as `Recipe.build` does."""
        host, num_nodes = self.host, self.graph.num_nodes
        key = (host.schedule.seed, epoch, step, micro)
        numbers = host.schedule.edges(epoch, step, micro)
        edges = self._send(numbers)
        source, target, p = self.edge_source[edges].long(), self.edge_target[edges].long(), len(edges)
        negatives = self.candidates.draw(
            source, target, host.negative_count, host.shared_negatives, derive_key(*key, Stream.NEGATIVES)
        )
        tails = negatives.tails if p else source  # a pool without positives has no use
        ids = torch.cat([source, target, tails.flatten()])
        local, seeds, count = relabel(ids, min(len(ids), num_nodes), num_nodes)
        pairs = p if host.exclude_targets else 0
        excluded = Excluded.of_pairs(self.graph, seeds, local[:pairs], local[p : p + pairs])
        nodes, count, blocks = sample_blocks(
            self.graph, seeds, count, excluded, host.hops, derive_key(*key, Stream.SAMPLING)
        )
        inputs = self.values[nodes].float()
        if self.stored is not None:
            inputs = torch.cat([inputs, self._neighbourhood(nodes, excluded, self._most_left(numbers, pairs))], dim=1)
        return DeviceBatch(
            micro, nodes, count, local[:p], local[p : 2 * p], local[2 * p :].view(tails.shape), negatives, blocks,
            inputs, self.stored is not None, excluded.pairs, derive_key(*key, Stream.DROPOUT),
        )  # fmt: skip

    def _send(self, numbers: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(numbers)
        if self.device.type == "cuda":  # from pageable memory the copy would wait for the stream
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _most_left(self, numbers: NDArray[np.int64], pairs: int) -> int:
        """Return how many entries at most must be read again for the first hop: a number the host knows."""
        if self.host.stored_first_hop != "max" or pairs == 0:
            return 2 * pairs  # only rows with more excluded than left: fewer than are excluded
        ends = np.unique(np.concatenate([self.host.edge_source[numbers], self.host.edge_target[numbers]]))
        return int((self.host.graph.indptr[ends + 1] - self.host.graph.indptr[ends]).sum())

    def _neighbourhood(self, nodes: Tensor, excluded: Excluded, most_left: int) -> Tensor:
        """Return `Features.neighbourhood`: float32 [n, F]."""
        assert self.stored is not None
        kind, starts = self.host.stored_first_hop, excluded.starts(len(nodes))
        num_excluded = starts.diff()
        left = self.graph.indptr[nodes + 1] - self.graph.indptr[nodes] - num_excluded
        anew = num_excluded > (0 if kind == "max" else left)
        owner, sent, valid = self._entries_left(nodes, torch.where(anew, left, 0), excluded, starts, most_left)
        anew, left = anew[:, None], left[:, None]
        out = self.stored[nodes]
        if kind == "max":
            out = out.masked_fill(anew, -torch.inf)
            out.scatter_reduce_(
                0, owner[:, None].expand_as(sent), sent.masked_fill(~valid[:, None], -torch.inf), "amax"
            )
            return out.masked_fill(left == 0, 0.0)
        out.index_add_(0, excluded.owner, self.values[excluded.partner].float(), alpha=-1)
        # exactly zero where nothing is left, and what is left added up where it is less: not what rounding leaves
        out = out.masked_fill(anew | (left == 0), 0.0).index_add_(0, owner, sent)
        return out * left.clamp(min=1).float().reciprocal() if kind == "mean" else out

    def _entries_left(
        self, nodes: Tensor, counts: Tensor, excluded: Excluded, starts: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (owner int64 [C], inputs float32 [C, F], valid bool [C]) of counts[i] entries left in each row i.

        C = capacity, at least counts.sum(); slots that are not used have zero inputs.
        """
        ends = counts.cumsum(0)
        slot = torch.arange(capacity, device=nodes.device)
        owner = torch.searchsorted(ends, slot, right=True)
        valid = owner < len(nodes)
        owner = owner.clamp(max=max(0, len(nodes) - 1))
        offset = excluded.offsets(owner, slot - (ends - counts)[owner], starts)
        return owner, self.values[self.graph.columns(nodes[owner], offset, valid)].float(), valid
