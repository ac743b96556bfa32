"""Raw data for tests: small citation graphs, and OGB folders on disk as OGB's own files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_trainer.data.graph import RawGraph
from horovod_trainer.data.prepare import prepare_store
from horovod_trainer.data.store import Store, open_store

SHARED = Path(__file__).resolve().parents[2] / "shared"


def silent(stage: str, done: int, total: int) -> None:
    """Take progress and say nothing."""


def raw_graph(num_nodes: int, edges: Any, **more: Any) -> RawGraph:
    """Return a RawGraph of pairs (source, target); directed unless told otherwise."""
    pairs = np.array(edges, np.int64).reshape(-1, 2).T
    return RawGraph(**{
        "name": "small", "kind": "test", "origin": "a test", "licence": "none", "num_nodes": num_nodes,
        "edges": pairs, "directed": True, **more,
    })  # fmt: skip


def citations(seed: int, num_nodes: int, per_node: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (edges [2, E], year [N]): every paper cites up to `per_node` papers of its own year or earlier."""
    rng = np.random.default_rng(seed)
    year = np.sort(rng.integers(1990, 2000, num_nodes))
    pairs = {(u, int(v)) for u in range(1, num_nodes) for v in rng.integers(0, u, per_node) if year[v] <= year[u]}
    return np.array(sorted(pairs), np.int64).T, year


def open_prepared(config: Any) -> Store:
    """Return the store that a data section describes, prepared in silence."""
    return open_store(prepare_store(config, silent))


def write_csv(file: Path, rows: Any) -> None:
    """Write numbers as OGB does: gzipped CSV without a header."""
    np.savetxt(file, np.asarray(rows).reshape(len(rows), -1), delimiter=",", fmt="%s")  # gzips by the name


def write_ogb(
    root: Path, name: str, kind: str, graph: dict[str, Any], split: dict[str, dict[str, Any]], **save: Any
) -> Path:
    """Write an OGB folder: graph holds edge_index [2, E], num_nodes, perhaps node-feat and node_year; return it."""
    folder = root / name.replace("-", "_")
    for part in ("raw", f"split/{kind}", "processed", "mapping"):
        (folder / part).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    write_csv(folder / "raw" / "edge.csv.gz", graph["edge_index"].T)
    write_csv(folder / "raw" / "num-node-list.csv.gz", [graph["num_nodes"]])
    write_csv(folder / "raw" / "num-edge-list.csv.gz", [graph["edge_index"].shape[1]])
    for part in ("node-feat", "node_year"):
        if part in graph:
            write_csv(folder / "raw" / f"{part}.csv.gz", graph[part])
    for part, content in split.items():
        torch.save(content, folder / "split" / kind / f"{part}.pt", **save)
    return folder
