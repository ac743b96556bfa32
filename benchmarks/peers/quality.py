"""Train PyG's GraphSAGE on pubmed-temporal with our loss and negatives; print when each validation came and its MRR.

`full`: every step embeds all nodes of the graph without the batch's target edges. `sampled`: every step embeds the
batch's nodes from sampled neighbours, the batch's target edges taken out of what was sampled. Both: SAGEConv mean with
L2-normalised layers, dropout, dot product, sampled softmax over shared negatives not later than their source, Adam.
Runs in the peers' environment; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torch_sparse import SparseTensor

LAYERS, WIDTH, TEMPERATURE = 2, 256, 0.03  # as configs/pubmed-temporal.yaml


class Citations:
    """The graph and its split: features x with rows of length 1, training edges, symmetric CSR, validation queries."""

    def __init__(self, folder: Path) -> None:
        graph = np.load(folder / "pubmed_temporal_small.npz")
        split = np.load(folder / "split_citation2_style.npz")
        n, width = (int(size) for size in graph["x_shape"])
        rows = np.repeat(np.arange(n), graph["x_rownnz"].astype(np.int64))
        x = np.zeros((n, width), np.float32)
        x[rows, graph["x_indices"].astype(np.int64)] = graph["x_data"]
        self.num_nodes, self.x = n, functional.normalize(torch.from_numpy(x))
        self.year = graph["node_year"].astype(np.int64)
        self.source, self.target = split["train_edge"].astype(np.int64)
        pairs = np.concatenate([self.source * n + self.target, self.target * n + self.source])
        self.keys, places = np.unique(pairs, return_inverse=True)  # of the symmetric graph, ascending
        self.forth, self.back = places.reshape(2, -1)  # where each training edge and its reverse stand among the keys
        self.row, self.col = torch.from_numpy(self.keys // n), torch.from_numpy(self.keys % n)
        self.cited = np.unique(self.source * n + self.target)  # training citations, ascending
        self.by_year = np.argsort(self.year, kind="stable")
        self.up_to = np.searchsorted(self.year[self.by_year], self.year, side="right")  # nodes not later than each
        held_out = split["valid_target"].astype(np.int64)[:, None]
        self.queries = torch.from_numpy(split["source"].astype(np.int64))
        self.candidates = torch.from_numpy(np.hstack([held_out, split["valid_target_neg"].astype(np.int64)]))

    def matrix(self, keep: Any = slice(None)) -> Any:
        """Return the chosen entries of the symmetric graph as torch-sparse's matrix."""
        n = self.num_nodes
        return SparseTensor(
            row=self.row[keep], col=self.col[keep], sparse_sizes=(n, n), is_sorted=True, trust_data=True
        )

    def negatives(self, random: np.random.Generator, source: Any, target: Any, size: int) -> tuple[Any, Any]:
        """Return a pool of tails, uniform over what the latest source may cite, and which count for whom: bool [P, K]."""
        pool = self.by_year[random.integers(self.up_to[source].max(), size=size)]
        valid = (self.year[pool] <= self.year[source][:, None]) & (pool != target[:, None]) & (pool != source[:, None])
        order = np.argsort(pool)
        ranked = pool[order]
        first = np.searchsorted(self.cited, source * self.num_nodes)
        last = np.searchsorted(self.cited, (source + 1) * self.num_nodes)
        who, entry = spread(first, last)
        cited = self.cited[entry] % self.num_nodes
        hit, place = spread(np.searchsorted(ranked, cited), np.searchsorted(ranked, cited, side="right"))
        valid[who[hit], order[place]] = False
        return pool, torch.from_numpy(valid)


def spread(first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every position of the ranges [first[i], last[i]) with the i it belongs to."""
    length = last - first
    owner = np.repeat(np.arange(len(first)), length)
    return owner, np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length) + first[owner]


class Sage(torch.nn.Module):
    """SAGEConv layers, each output of length 1; ReLU and dropout between them."""

    def __init__(self, width_in: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        widths = [width_in] + [WIDTH] * LAYERS
        self.convs = torch.nn.ModuleList(SAGEConv(a, b, aggr="mean", normalize=True) for a, b in pairwise(widths))

    def forward(self, x: Any, adjs: Sequence[Any]) -> Any:
        """Return embeddings of the last matrix's rows."""
        for number, (conv, adj_t) in enumerate(zip(self.convs, adjs, strict=True)):
            if number:
                x = functional.dropout(functional.relu(x), self.dropout, self.training)
            x = conv((x, x[: adj_t.size(0)]), adj_t)
        return x


def full_batch(graph: Citations, model: Sage, edges: Any, pool: Any) -> tuple[Any, Any, Any]:
    """Return embeddings of the batch's sources and targets and of the pool, on the graph without the batch's edges."""
    keep = np.ones(len(graph.keys), np.bool_)
    keep[graph.forth[edges]] = keep[graph.back[edges]] = False
    adj_t = graph.matrix(torch.from_numpy(keep))
    h = model(graph.x, [adj_t] * LAYERS)
    return h[graph.source[edges]], h[graph.target[edges]], h[pool]


def sampled(graph: Citations, model: Sage, edges: Any, pool: Any, fanouts: list[int]) -> tuple[Any, Any, Any]:
    """Return the same from sampled neighbours, each layer trimmed to the hops that it needs."""
    n, source, target = graph.num_nodes, graph.source[edges], graph.target[edges]
    nodes, places = np.unique(np.concatenate([source, target, pool]), return_inverse=True)
    whole = graph.matrix()
    n_id, row, col, _ = torch.ops.torch_sparse.neighbor_sample(
        whole.storage.rowptr(), whole.storage.col(), torch.from_numpy(nodes), fanouts, False, True
    )
    sizes, ends = [len(nodes)], []
    for _ in fanouts:  # nodes and edges come in the order of their hops
        ends.append(int(torch.searchsorted(col, sizes[-1])))
        sizes.append(max(sizes[-1], int(row[: ends[-1]].max()) + 1 if ends[-1] else 0))
    out = np.unique(np.concatenate([source * n + target, target * n + source]))
    keys = (n_id[col] * n + n_id[row]).numpy()
    found = np.searchsorted(out, keys)
    keep = torch.from_numpy(out[np.minimum(found, len(out) - 1)] != keys)
    adjs = []
    for inner, outer, end in zip(sizes[:-1], sizes[1:], ends, strict=True):
        kept = keep[:end]
        adjs.append(
            SparseTensor(
                row=col[:end][kept], col=row[:end][kept], sparse_sizes=(inner, outer), is_sorted=True, trust_data=True
            )
        )
    h = model(graph.x[n_id], adjs[::-1])
    a, b, c = np.split(places, [len(source), 2 * len(source)])
    return h[a], h[b], h[c]


def train_epoch(
    graph: Citations, model: Sage, optimizer: Any, random: np.random.Generator, epoch: int, args: Any
) -> None:
    """Take one pass over the training edges in random order."""
    model.train()
    steps = -(-len(graph.source) // args.batch)
    order = random.permutation(len(graph.source))
    for step, first in enumerate(range(0, len(order), args.batch)):
        done = (epoch - 1) * steps + step
        warm = min(1.0, (done + 1) / args.warmup) if args.warmup else 1.0
        left = 1 - max(0, done - args.warmup) / (args.epochs * steps - args.warmup) if args.linear else 1.0
        optimizer.param_groups[0]["lr"] = args.lr * warm * left
        edges = order[first : first + args.batch]
        pool, valid = graph.negatives(random, graph.source[edges], graph.target[edges], args.pool)
        if args.kind == "full":
            a, b, tails = full_batch(graph, model, edges, pool)
        else:
            a, b, tails = sampled(graph, model, edges, pool, args.fanouts)
        pos, neg = (a * b).sum(-1) / TEMPERATURE, (a @ tails.T) / TEMPERATURE
        logits = torch.cat([pos[:, None], neg.masked_fill(~valid, -torch.inf)], dim=1)
        loss = (torch.logsumexp(logits, dim=1) - pos).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


@torch.no_grad()
def validate(graph: Citations, model: Sage) -> float:
    """Return the MRR of the validation queries among their own 1,000 negatives, by OGB's rule for ties."""
    model.eval()
    h = model(graph.x, [graph.matrix()] * LAYERS)
    scores = (h[graph.queries] @ h.T).gather(1, graph.candidates)
    pos, neg = scores[:, :1], scores[:, 1:]
    rank = 0.5 * ((neg > pos).sum(1) + (neg >= pos).sum(1)) + 1
    return float((1.0 / rank).mean())


def main() -> None:
    """Train until the epochs or the seconds are over; print the validations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kind", choices=("full", "sampled"), required=True)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--linear", action="store_true", help="learning rate falls to 0 with the last epoch")
    parser.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate rises from 0")
    parser.add_argument("--pool", type=int, default=1024, help="shared negatives of a step")
    parser.add_argument("--dropout", type=float, default=0.4)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--every", type=int, default=1, help="epochs between validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--started", type=float, help="seconds since 1970 at which the clock starts; now by default")
    parser.add_argument("--max-seconds", type=float, default=300.0)
    args = parser.parse_args()
    started = args.started or time.time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    graph = Citations(args.data)
    model = Sage(graph.x.shape[1], args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    ready = time.time()
    valid = []
    for epoch in range(1, args.epochs + 1):
        train_epoch(graph, model, optimizer, random, epoch, args)
        last = epoch == args.epochs or time.time() - started > args.max_seconds
        if last or epoch % args.every == 0:
            mrr = validate(graph, model)
            valid.append({"epoch": epoch, "seconds": time.time() - started, "mrr": mrr})
        if last:
            break
    print(json.dumps({"loading_seconds": ready - started, "valid": valid}))


if __name__ == "__main__":
    main()
