"""The ogb source: ogbl-* data sets in OGB's on-disk layout, read directly: no prompt, no network unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.cores import usable_cores
from horovod_trainer.data import csr
from horovod_trainer.data.graph import RawGraph, Split, as_ids
from horovod_trainer.data.sources import Progress, ogb_download, ogb_graph
from horovod_trainer.data.sources.torchfiles import load_torch_file
from horovod_trainer.data.store import HeldOut, file_sha256
from horovod_trainer.errors import InvalidInput, NotFound, Problem, nearest

KNOWLEDGE_GRAPHS = ("ogbl-wikikg2", "ogbl-biokg")


@dataclass(frozen=True)
class Published:
    """What OGB publishes of a data set. counts: nodes, train, valid and test edges."""

    archive: str
    split: str
    directed: bool
    licence: str
    counts: tuple[int, int, int, int] | None
    both_ways: bool = False  # OGB's own classes add the reverse of every edge


DATASETS = {
    "ogbl-citation2": Published("citation-v2", "time", True, "ODC-BY", (2_927_963, 30_387_995, 86_596, 86_596)),
    "ogbl-collab": Published("collab", "time", False, "ODC-BY", (235_868, 1_179_052, 60_084, 46_329), True),
    "ogbl-ppa": Published("ppassoc", "throughput", False, "CC-0", (576_289, 21_231_931, 6_062_562, 3_031_780), True),
    "ogbl-ddi": Published("ddi", "target", False, "CC-0", (4_267, 1_067_911, 133_489, 133_489), True),
    "ogbl-vessel": Published("vessel", "spatial", False, "CC BY-NC 4.0", None),
}


def fingerprint(config: DataSection, progress: Progress) -> dict[str, str]:
    """Return the digests of every file that `load` reads, downloading the data set first when config.download is set.

    Raises NotFound naming the folder when it is absent and not to be downloaded, Unreachable when that fails.
    """
    folder = _folder(config)
    if folder is None:
        published, root = published_as(config.name), Path(config.path or "")
        if not config.download:
            message = f"no {root / folder_name(config.name)} here; set data.download=true to fetch it"
            raise NotFound(Problem("data.path", message, config.path))
        folder = ogb_download.download(root, folder_name(config.name), published.archive, progress)
    files = [*ogb_graph.graph_files(folder), *_split_files(folder, published_as(config.name))]
    digests = {}
    with ThreadPoolExecutor(max(1, int(usable_cores()))) as pool:  # hashing releases the GIL
        for file, digest in zip(files, pool.map(file_sha256, files), strict=True):
            digests[file.relative_to(folder).as_posix()] = digest
            progress("digest raw files", len(digests), len(files))
    return digests


def load(config: DataSection, progress: Progress) -> RawGraph:
    """Return the data set with its own split; the graph's file must agree with the training edges.

    Raises InvalidInput naming the file where sizes disagree or something in it cannot be trusted.
    """
    published = published_as(config.name)
    folder = _folder(config)
    if folder is None:
        raise NotFound(Problem("data.path", f"no {folder_name(config.name)} here", config.path))
    with ThreadPoolExecutor(1) as pool:  # half of reading the split happens without the GIL
        reading = pool.submit(read_split, folder, published)
        graph = ogb_graph.read_graph(folder, published.both_ways, Path(config.store).parent, progress)
        progress("read split", 0, 1)
        split = reading.result()
        progress("read split", 1, 1)
    warnings = _disagreements(config.name, graph, split, published, folder)
    if not (folder / "RELEASE_v1.txt").is_file():
        warnings.append(f"{folder} has no RELEASE_v1.txt: OGB's own class would take it for an outdated version")
    held = [held_out.edge.T for held_out in (split.valid, split.test)]
    return RawGraph(
        name=config.name, kind="ogb", origin=f"Open Graph Benchmark, {published.archive}", licence=published.licence,
        num_nodes=graph.num_nodes, edges=np.concatenate(held, axis=1), directed=published.directed,
        features=graph.features, year=graph.year, split=split, warnings=tuple(warnings),
    )  # fmt: skip


def published_as(name: str) -> Published:
    """Return what is published of a data set; raises InvalidInput for a name that this source cannot serve."""
    if name in KNOWLEDGE_GRAPHS:
        raise InvalidInput(Problem("data.name", "is a knowledge graph: its typed relations are not links", name))
    if name not in DATASETS:
        message = f"not a data set of this source{nearest(name, DATASETS)}; known: {', '.join(sorted(DATASETS))}"
        raise InvalidInput(Problem("data.name", message, name))
    return DATASETS[name]


def folder_name(name: str) -> str:
    """Return the folder in which OGB keeps a data set."""
    return name.replace("-", "_")


def _folder(config: DataSection) -> Path | None:
    """Return the data set's folder below data.path, where OGB's classes look, or data.path itself; None if absent."""
    root = Path(config.path or "")
    name = folder_name(config.name)
    for folder in (root / f"{name}_pyg", root / name, root):
        if (folder / "split").is_dir():
            return folder
    return None


def _split_files(folder: Path, published: Published) -> list[Path]:
    base = folder / "split" / published.split
    whole = base / "split_dict.pt"
    files = [whole] if whole.is_file() else [base / f"{part}.pt" for part in ("train", "valid", "test")]
    missing = [Problem(str(file), "missing") for file in files if not file.is_file()]
    if missing:
        raise NotFound(missing)
    return files


def read_split(folder: Path, published: Published) -> Split:
    """Return the split of an OGB folder: split_dict.pt, or train.pt, valid.pt and test.pt."""
    files = _split_files(folder, published)
    where = str(files[0].parent)
    whole = load_torch_file(files[0]) if len(files) == 1 else None
    # one file after the other: a part takes half the memory once its ids are int32
    parts = (load_torch_file(file) for file in files) if whole is None else _parts_of(whole)
    train = _edges(f"{where}: train", next(parts))
    valid, test = (_held_out(f"{where}: {part}", next(parts)) for part in ("valid", "test"))
    return Split(train, valid, test)


def _parts_of(whole: Any) -> Iterator[Any]:
    """Yield the parts of a split in one file."""
    for part in ("train", "valid", "test"):
        yield whole.get(part) if isinstance(whole, dict) else None


def _edges(where: str, part: Any) -> NDArray[Any]:
    """Return edges [2, E] of a part of either kind."""
    if not isinstance(part, dict):
        raise InvalidInput(Problem(where, "is no dictionary; a split is three: train, valid, test"))
    if {"source_node", "target_node"} <= part.keys():
        rows = [as_ids(f"{where}: {key}", part[key]) for key in ("source_node", "target_node")]
        if rows[0].ndim != 1 or rows[0].shape != rows[1].shape:
            raise InvalidInput(Problem(where, "source_node and target_node differ in length"))
        return np.stack(rows)
    if "edge" in part:
        pairs = as_ids(f"{where}: edge", part["edge"])
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise InvalidInput(Problem(where, "edge must be [E, 2]", pairs.shape))
        return np.ascontiguousarray(pairs.T)
    raise InvalidInput(Problem(where, "neither source_node and target_node nor edge", sorted(map(str, part))))


def _held_out(where: str, part: Any) -> HeldOut:
    """Return held-out edges with their negatives per edge (citation2) or in one pool (collab, ppa, ddi, vessel)."""
    edge = _edges(where, part).T
    if "target_node_neg" in part:
        negatives = as_ids(f"{where}: target_node_neg", part["target_node_neg"])
        return HeldOut(edge, negatives)
    if "edge_neg" in part:
        pool = as_ids(f"{where}: edge_neg", part["edge_neg"])
        return HeldOut(edge, None, pool)
    raise InvalidInput(Problem(where, "no negatives: neither target_node_neg nor edge_neg"))


def _disagreements(
    name: str, graph: ogb_graph.GraphFile, split: Split, published: Published, folder: Path
) -> list[str]:
    """Raise InvalidInput where the graph cannot be that of the split; return what else is not as published."""
    found = []
    train, n = split.train, graph.num_nodes
    low, high = int(graph.edges.min(initial=0)), int(graph.edges.max(initial=0))
    if low < 0 or high >= n:  # the split's edges are what is stored, but a graph like that is damaged
        raise InvalidInput(Problem(f"{folder}: edges of the graph", f"unknown ids: outside [0, {n})", [low, high]))
    if published.counts is not None:
        if graph.edges.shape[1] != train.shape[1]:
            message = f"the graph has {graph.edges.shape[1]} edges, the split {train.shape[1]} training edges"
            raise InvalidInput(Problem(str(folder), message))
        if not _same_edges(graph.edges, train, graph.num_nodes, published.directed):
            found.append(f"{name}: the graph's edges are not the training edges of the split")
        got = (graph.num_nodes, train.shape[1], len(split.valid.edge), len(split.test.edge))
        for what, have, expected in zip(
            ("nodes", "training edges", "valid edges", "test edges"), got, published.counts, strict=True
        ):
            if have != expected:
                found.append(f"not the published {name}: {have} {what}, published {expected}")
    return found


def _same_edges(a: NDArray[Any], b: NDArray[Any], num_nodes: int, directed: bool) -> bool:
    """Return whether two [2, E] hold the same edges, in whatever order."""
    if np.array_equal(a, b):
        return True
    if any(edges.min(initial=0) < 0 or edges.max(initial=0) >= num_nodes for edges in (a, b)):
        return False  # the split's: `cleaned` says what is wrong
    one, other = (_distinct(edges, num_nodes, directed) for edges in (a, b))
    return np.array_equal(one.indptr, other.indptr) and np.array_equal(one.indices, other.indices)


def _distinct(edges: NDArray[Any], num_nodes: int, directed: bool) -> csr.Csr:
    return csr.distinct(csr.from_pairs(edges if directed else np.sort(edges, axis=0), num_nodes))[0]
