"""One training step of PyG on the big store, timed: GraphSAGE mean, dot product, one uniform negative per seed edge.

Runs in the peers' environment, on the core it is pinned to. The last line is one JSON object with the seconds of
a mean step and of its phases. Target edges stay in the sampled neighbourhoods: PyG's loaders do not take them out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborSampler
from torch_geometric.nn import SAGEConv
from torch_sparse import SparseTensor

WIDTH = 256
PHASES = ("sample", "gather", "forward", "backward", "step")


class Arrays:
    """The store's arrays in memory, as PyG wants them: int64 ids, the symmetric graph in rows of the receiving node."""

    def __init__(self, store: Path) -> None:
        def load(name: str) -> Any:
            return torch.from_numpy(np.load(store / f"{name}.npy"))

        self.rowptr, self.col, self.x = load("indptr"), load("indices").long(), load("features")
        self.source, self.target = load("train_source").long(), load("train_target").long()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.rowptr) - 1

    def adj_t(self) -> Any:
        """Return the graph as torch-sparse's matrix."""
        n = self.num_nodes
        return SparseTensor(rowptr=self.rowptr, col=self.col, sparse_sizes=(n, n), is_sorted=True, trust_data=True)


class Sage(torch.nn.Module):
    """SAGEConv layers with ReLU between them, on what the variant's sampler gives."""

    def __init__(self, width_in: int, layers: int) -> None:
        super().__init__()
        widths = [width_in] + [WIDTH] * layers
        self.convs = torch.nn.ModuleList(SAGEConv(a, b, aggr="mean") for a, b in pairwise(widths))

    def whole(self, x: Any, edge_index: Any) -> Any:
        """Return embeddings of all nodes of one sampled subgraph."""
        for number, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if number < len(self.convs) - 1:
                x = functional.relu(x)
        return x

    def layered(self, x: Any, adjs: list[Any]) -> Any:
        """Return the seeds' embeddings from one bipartite graph per layer, the outermost hop first."""
        for number, (conv, adj_t) in enumerate(zip(self.convs, adjs, strict=True)):
            x = conv((x, x[: adj_t.size(0)]), adj_t)
            if number < len(self.convs) - 1:
                x = functional.relu(x)
        return x


class Clock:
    """Seconds per phase of the steps taken."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.cpu: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        """Start a step."""
        self.steps.append({})
        self.cpu.append(time.process_time())
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase of the step."""
        now = time.perf_counter()
        self.steps[-1][phase] = self.steps[-1].get(phase, 0.0) + now - self._last
        self._last = now


# A variant turns (arrays, fan-outs, batch size) into batches: each call samples and gathers one, and returns what
# embeds it and the local ids of source, target and negative tails [B].
Embed = Callable[[Sage], Any]
Batches = Iterator[tuple[Embed, Any, Any, Any]]


def link_loader(arrays: Arrays, fanouts: list[int], batch: int, clock: Clock, sparse: bool) -> Batches:
    """LinkNeighborLoader, its neighbourhoods as edge_index or as SparseTensor; it gathers while sampling."""
    if sparse:
        data = Data(x=arrays.x, adj_t=arrays.adj_t())
    else:
        rows = torch.repeat_interleave(torch.arange(arrays.num_nodes), arrays.rowptr.diff())
        data = Data(x=arrays.x, edge_index=torch.stack([arrays.col, rows]))
    loader = LinkNeighborLoader(
        data, fanouts, edge_label_index=torch.stack([arrays.source, arrays.target]), batch_size=batch, shuffle=True,
        neg_sampling="triplet", is_sorted=True,
    )  # fmt: skip
    for part in loader:
        clock.lap("sample")
        graph = part.adj_t if sparse else part.edge_index

        def embed(model: Sage, x: Any = part.x, graph: Any = graph) -> Any:
            return model.whole(x, graph)

        yield embed, part.src_index, part.dst_pos_index, part.dst_neg_index


def seeds(arrays: Arrays, batch: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield unique node ids and the places in them of a random batch's sources, targets and negative tails."""
    order = torch.randperm(len(arrays.source))
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        tails = torch.randint(arrays.num_nodes, (len(chosen),))
        ids = torch.cat([arrays.source[chosen], arrays.target[chosen], tails]).numpy()
        nodes, places = np.unique(ids, return_inverse=True)
        source, target, tails = torch.from_numpy(places).chunk(3)
        yield torch.from_numpy(nodes), source, target, tails


def layered(arrays: Arrays, fanouts: list[int], batch: int, clock: Clock) -> Batches:
    """OGB's way for citation2: the layered NeighborSampler over a batch's nodes, one SparseTensor per layer."""
    sampler = NeighborSampler(
        arrays.adj_t(), node_idx=torch.arange(1), sizes=fanouts, return_e_id=False, batch_size=batch
    )
    for nodes, source, target, tails in seeds(arrays, batch):
        _, n_id, found = sampler.sample(nodes)
        adjs = [adj.adj_t for adj in (found if isinstance(found, list) else [found])]
        clock.lap("sample")
        x = arrays.x[n_id]
        clock.lap("gather")

        def embed(model: Sage, x: Any = x, adjs: list[Any] = adjs) -> Any:
            return model.layered(x, adjs)

        yield embed, source, target, tails


def trimmed(arrays: Arrays, fanouts: list[int], batch: int, clock: Clock) -> Batches:
    """The sampler below NeighborLoader, each layer trimmed to the hops it needs as trim_to_layer does.

    torch-sparse does not say how many nodes a hop brought, which trim_to_layer wants; but nodes and edges come in order
    of their hops, so that the first `size` nodes and the edges into them are those of a layer.
    """
    sample = torch.ops.torch_sparse.neighbor_sample
    for nodes, source, target, tails in seeds(arrays, batch):
        n_id, row, col, _ = sample(arrays.rowptr, arrays.col, nodes, fanouts, False, True)
        sizes, ends = [len(nodes)], []
        for _ in fanouts:
            ends.append(int(torch.searchsorted(col, sizes[-1])))
            sizes.append(max(sizes[-1], int(row[: ends[-1]].max()) + 1 if ends[-1] else 0))
        adjs = [
            SparseTensor(row=col[:end], col=row[:end], sparse_sizes=(inner, outer), is_sorted=True, trust_data=True)
            for inner, outer, end in zip(sizes[:-1], sizes[1:], ends, strict=True)
        ][::-1]
        clock.lap("sample")
        x = arrays.x[n_id]
        clock.lap("gather")

        def embed(model: Sage, x: Any = x, adjs: list[Any] = adjs) -> Any:
            return model.layered(x, adjs)

        yield embed, source, target, tails


VARIANTS: dict[str, Callable[[Arrays, list[int], int, Clock], Batches]] = {
    "link_loader": partial(link_loader, sparse=False),
    "link_loader_sparse": partial(link_loader, sparse=True),
    "layered": layered,
    "trimmed": trimmed,
}


def train(batches: Batches, model: Sage, steps: int, clock: Clock) -> None:
    """Take `steps` optimizer steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        clock.begin()
        embed, source, target, tails = next(batches)
        h = embed(model)
        a = h[source]
        pos, neg = (a * h[target]).sum(-1), (a * h[tails]).sum(-1)
        loss = functional.softplus(-pos).mean() + functional.softplus(neg).mean()
        clock.lap("forward")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        clock.lap("backward")
        optimizer.step()
        clock.lap("step")


def main() -> None:
    """Train a few steps and print the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--fanouts", type=int, nargs="+", required=True)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    arrays, clock = Arrays(args.store), Clock()
    model = Sage(arrays.x.shape[1], len(args.fanouts))
    train(VARIANTS[args.variant](arrays, args.fanouts, args.batch, clock), model, args.warmup + args.steps, clock)
    timed = clock.steps[args.warmup :]
    cpu = (time.process_time() - clock.cpu[args.warmup]) / len(timed)
    phases = {phase: sum(step.get(phase, 0.0) for step in timed) / len(timed) for phase in PHASES}
    seconds = sum(phases.values())
    answer = {"variant": args.variant, "seconds_per_step": seconds, "edges_per_second": args.batch / seconds}
    print(json.dumps({**answer, "phases": phases, "cpu_seconds_per_step": cpu, "steps": len(timed)}))


if __name__ == "__main__":
    main()
