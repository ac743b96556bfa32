"""PyG's layer-wise inference and OGB's scoring loop over the big store, as OGB's ogbl-citation2 example does them.

Runs in the peers' environment, one process. A whole run takes very long: of every layer some batches are timed, spread over
all nodes, and of the scoring some queries; the last line is one JSON object with the seconds of the whole, extrapolated.
The weights are random: time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NeighborSampler
from torch_geometric.nn import SAGEConv
from torch_sparse import SparseTensor

WIDTH, LAYERS, BATCH = 256, 3, 4096
PAIRS = 64 * 1024  # what OGB's example scores at a time
QUERIES = 512


def main() -> None:
    """Time both ways to read all neighbours; the quicker one counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=6, help="timed of every layer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    arrays = {name: np.load(args.store / f"{name}.npy", mmap_mode="c") for name in ("indptr", "indices", "features")}
    rowptr, col = torch.from_numpy(arrays["indptr"]), torch.from_numpy(arrays["indices"]).long()
    x = torch.from_numpy(arrays["features"])
    nodes = len(rowptr) - 1
    adj_t = SparseTensor(rowptr=rowptr, col=col, sparse_sizes=(nodes, nodes), is_sorted=True, trust_data=True)
    batches = -(-nodes // BATCH)
    chosen = [batches * (2 * k + 1) // (2 * args.batches) for k in range(args.batches)]
    chosen = [chosen[0], *chosen]  # the first one twice, to warm up
    # every layer's input is of the width it would have; what is in it does not matter
    inputs = [x, *[torch.empty(nodes, WIDTH).fill_(0.5)] * (LAYERS - 1)]
    seconds: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, read in READERS.items():
            seconds[name] = [
                batches * time_layer(read(h, adj_t, chosen), h.shape[1], last=number == LAYERS - 1)
                for number, h in enumerate(inputs)
            ]
        scores = score(inputs[-1], args.store)
    best = min(seconds, key=lambda name: sum(seconds[name]))
    print(
        json.dumps(
            {
                "embed_seconds": sum(seconds[best]), "best": best, "layer_seconds": seconds, **scores,
                "timed_batches_of_a_layer": args.batches, "batches_of_a_layer": batches, "timed_queries": QUERIES,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    )  # fmt: skip


# (inputs of the nodes and their neighbours, the nodes first; graph [nodes, nodes and neighbours]), batch by batch
Batches = Iterator[tuple[torch.Tensor, Any]]


def ids(x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Return the nodes of the chosen batches."""
    return torch.cat([torch.arange(batch * BATCH, min(batch * BATCH + BATCH, len(x))) for batch in chosen])


def layered(x: torch.Tensor, adj_t: Any, chosen: list[int]) -> Batches:
    """OGB's way: the layered NeighborSampler with all neighbours of one hop."""
    for _, n_id, adj in NeighborSampler(
        adj_t, node_idx=ids(x, chosen), sizes=[-1], return_e_id=False, batch_size=BATCH
    ):
        yield x[n_id], adj.adj_t


def loaded(x: torch.Tensor, adj_t: Any, chosen: list[int]) -> Batches:
    """Today's way: NeighborLoader with all neighbours of one hop."""
    data = Data(x=x, adj_t=adj_t)
    for part in NeighborLoader(data, [-1], input_nodes=ids(x, chosen), batch_size=BATCH, is_sorted=True):
        yield part.x, part.adj_t[: part.batch_size]


READERS: dict[str, Callable[[torch.Tensor, Any, list[int]], Batches]] = {
    "NeighborSampler": layered,
    "NeighborLoader": loaded,
}


def time_layer(batches: Batches, width: int, last: bool) -> float:
    """Return seconds per batch of one layer: neighbours, gathering, SAGEConv, ReLU; the first batch is not counted."""
    conv = SAGEConv(width, WIDTH, aggr="mean")
    started, timed = 0.0, -1
    for rows, graph in batches:
        out = conv((rows, rows[: graph.size(0)]), graph)
        if not last:
            functional.relu(out)
        timed += 1
        started = started or time.perf_counter()
    return (time.perf_counter() - started) / timed


def score(h: torch.Tensor, store: Path) -> dict[str, float]:
    """Return seconds of scoring all test queries, by the dot product and by OGB's LinkPredictor."""
    edge = np.load(store / "test_edge.npy")
    negatives = np.load(store / "test_negatives.npy", mmap_mode="r")[:QUERIES]
    tails = torch.from_numpy(np.concatenate([edge[:QUERIES, 1:], negatives], axis=1).astype(np.int64))
    source = torch.from_numpy(edge[:QUERIES, 0].astype(np.int64)).view(-1, 1).expand_as(tails).reshape(-1)
    tails = tails.view(-1)
    mlp = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 1), torch.nn.Sigmoid(),
    )  # fmt: skip
    decoders: dict[str, Callable[[Any, Any], Any]] = {
        "dot": lambda a, b: (a * b).sum(-1),
        "mlp": lambda a, b: mlp(a * b).squeeze(-1),
    }
    seconds = {}
    for name, decoder in decoders.items():
        started = time.perf_counter()
        for first in range(0, len(tails), PAIRS):
            some = slice(first, first + PAIRS)
            decoder(h[source[some]], h[tails[some]])
        seconds[f"{name}_seconds"] = (time.perf_counter() - started) * len(edge) / QUERIES
    return seconds


if __name__ == "__main__":
    main()
