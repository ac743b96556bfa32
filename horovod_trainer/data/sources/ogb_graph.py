"""The graph of an OGB folder: gzipped CSV, npz, or what OGB's classes left in processed/."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.data.archives import read_npz
from horovod_trainer.data.graph import as_floats, as_ids
from horovod_trainer.data.sources import Progress
from horovod_trainer.data.sources.tables import read_table
from horovod_trainer.data.sources.torchfiles import load_torch_file
from horovod_trainer.data.store import unnamed_array, write_back
from horovod_trainer.errors import InvalidInput, NotFound, Problem

_PYG, _PLAIN = "processed/geometric_data_processed.pt", "processed/data_processed"


@dataclass(frozen=True)
class GraphFile:
    """edges [2, E] (the training graph, each edge once), features float32 [N, F] or None, year [N] or None."""

    num_nodes: int
    edges: NDArray[Any]
    features: NDArray[np.float32] | None
    year: NDArray[Any] | None


def graph_files(folder: Path) -> list[Path]:
    """Return the files that `read_graph` reads, raw ones first choice; raises NotFound when there are none."""
    raw = folder / "raw"
    if (raw / "edge.csv.gz").is_file():
        names = ("edge", "node-feat", "node_year", "num-node-list", "num-edge-list")
        # a link that leads nowhere is not nothing: features must not be lost without a word
        files = [file for name in names if os.path.lexists(file := raw / f"{name}.csv.gz")]
        problems = [Problem(str(file), "is a folder, not a gzipped CSV") for file in files if file.is_dir()]
        if problems:
            raise InvalidInput(problems)
        return files
    for file in (raw / "data.npz", folder / _PYG, folder / _PLAIN):
        if file.is_file():
            return [file]
    raise NotFound(Problem(str(folder), "no raw/edge.csv.gz, no raw/data.npz and no processed graph"))


def read_graph(folder: Path, both_ways: bool, scratch: Path, progress: Progress) -> GraphFile:
    """Return the graph in an OGB folder; both_ways: processed files hold every edge followed by its reverse.

    Features that are read from CSV lie in a nameless file on the disk of the folder `scratch`, not in memory.
    """
    first = graph_files(folder)[0]
    if first.name == "edge.csv.gz":
        return _from_csv(first.parent, scratch, progress)
    if first.suffix == ".npz":
        return _from_npz(first)
    return _from_processed(first, both_ways)


def _from_csv(raw: Path, scratch: Path, progress: Progress) -> GraphFile:
    nodes, edges = (_single(raw / f"num-{kind}-list.csv.gz") for kind in ("node", "edge"))
    pairs = read_table(raw / "edge.csv.gz", edges, np.int32, progress, partial(np.empty, order="F"))
    if pairs.shape[1] != 2:
        raise InvalidInput(Problem(str(raw / "edge.csv.gz"), "has two columns", pairs.shape[1]))
    file, year, features = raw / "node-feat.csv.gz", raw / "node_year.csv.gz", None
    if os.path.lexists(file):
        features = read_table(file, nodes, np.float32, progress, partial(unnamed_array, scratch))
        write_back(features)
    return GraphFile(
        nodes,
        pairs.T,
        features,
        read_table(year, nodes, np.float64, progress)[:, 0] if os.path.lexists(year) else None,
    )


def _single(file: Path) -> int:
    """Return the one number in a file of counts."""
    counts = read_table(file, None, np.int64, lambda stage, done, total: None)
    if counts.shape != (1, 1):
        raise InvalidInput(Problem(str(file), "holds one count: a single graph", counts.shape))
    return int(counts[0, 0])


def _from_npz(file: Path) -> GraphFile:
    parts = read_npz(file, ("num_nodes_list", "num_edges_list", "edge_index", "node_feat", "node_year"))
    try:
        nodes, edges = (int(parts[name].item()) for name in ("num_nodes_list", "num_edges_list"))
        pairs, features = parts["edge_index"], parts.get("node_feat")
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise InvalidInput(Problem(str(file), f"not OGB's npz layout: {failure}")) from None
    return _checked(file, nodes, pairs, edges, features, parts.get("node_year"))


def _from_processed(file: Path, both_ways: bool) -> GraphFile:
    """Return the graph that an OGB class cached: PyG's (Data, slices) or a dictionary of numpy arrays."""
    if file.name == Path(_PLAIN).name:
        content = load_torch_file(file)
    else:
        from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
        from torch_geometric.data.storage import GlobalStorage

        content = load_torch_file(file, (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage))
        content = content[0] if isinstance(content, tuple) and content else content
        content = content.to_dict() if isinstance(content, Data) else content
    if not isinstance(content, dict) or not {"edge_index", "num_nodes"} <= content.keys():
        raise InvalidInput(Problem(str(file), "holds no graph: edge_index and num_nodes"))
    pairs, nodes = as_ids(f"{file}: edge_index", content["edge_index"]), content["num_nodes"]
    if pairs.ndim != 2 or not isinstance(nodes, int):
        raise InvalidInput(Problem(str(file), "edge_index must be [2, E] and num_nodes a whole number", pairs.shape))
    pairs = pairs[:, :: 2 if both_ways else 1]
    features = content.get("node_feat", content.get("x"))
    return _checked(file, nodes, pairs, pairs.shape[1], features, content.get("node_year"))


def _dense(where: str, array: Any) -> NDArray[Any] | None:
    try:
        return None if array is None else np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as failure:  # a sparse tensor, bfloat16, lists of different lengths
        raise InvalidInput(Problem(where, f"is no plain array of numbers: {failure}", type(array).__name__)) from None


def _checked(file: Path, nodes: int, pairs: Any, edges: int, features: Any, year: Any) -> GraphFile:
    """Return the graph of arrays in memory after checking their sizes against each other."""
    pairs = as_ids(f"{file}: edge_index", pairs)
    found = []
    if pairs.shape != (2, edges):
        found.append(Problem(f"{file}: edge_index", f"must be [2, {edges}]", pairs.shape))
    features, year = (
        _dense(f"{file}: {name}", array) for name, array in (("node_feat", features), ("node_year", year))
    )
    found += [
        Problem(f"{file}: {name}", f"needs {nodes} rows", array.shape)
        for name, array in (("node_feat", features), ("node_year", year))
        if array is not None and (array.shape[:1] != (nodes,) or (name == "node_year" and array.size == 0))
    ]
    if found:
        raise InvalidInput(found)
    return GraphFile(
        nodes,
        np.ascontiguousarray(pairs),
        None if features is None else as_floats(f"{file}: node_feat", features),
        None if year is None else year.reshape(nodes, -1)[:, 0],
    )
