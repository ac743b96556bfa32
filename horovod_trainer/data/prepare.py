"""From a data section to a store on disk: fetch, clean, split, check, write; nothing is done twice."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.console import get_logger
from horovod_trainer.cores import usable_cores
from horovod_trainer.data import csr
from horovod_trainer.data.checks import check_split
from horovod_trainer.data.gather import Aggregator, aggregate_range
from horovod_trainer.data.graph import RawGraph, Split, cleaned
from horovod_trainer.data.sampler import Graph
from horovod_trainer.data.sources import source_of
from horovod_trainer.data.splits import make_split, true_citations
from horovod_trainer.data.store import StoreWriter, open_store, refuse_other, verify_store
from horovod_trainer.documents import make_folder
from horovod_trainer.errors import InvalidInput, NotFound, Unreachable, naming

Progress = Callable[[str, int, int], None]  # stage, done, total
_ROWS = 1 << 14
_NO_CONTENT = (
    "store",
    "path",
    "download",
    "stage",
    "stage_limit_gib",
)  # where things lie does not change what they hold


def prepare_store(config: DataSection, progress: Progress) -> Path:
    """Return the folder of the store that `config` describes, made unless it is there already.

    A store of the same settings and the same raw files is left alone, and progress hears "unchanged"; any other store
    in its place is replaced. Without a network the source pubmed falls back to the generator; manifest["source"] and
    manifest["warnings"] say so. Raises InvalidInput, NotFound, Unreachable, Conflict.
    """
    path = Path(config.store)
    with _alone(path) as place:
        digests = source_of(config.source).fingerprint(config, progress)
        if _unchanged(path, config, config.source, digests, progress):
            progress("unchanged", 1, 1)
            return path
        raw = _load(config, digests, progress)
        if raw.kind != config.source and _unchanged(path, config, raw.kind, raw.digests, progress):
            progress("unchanged", 1, 1)
            return path
        progress("clean", 0, 1)
        graphs = [cleaned(raw)]
        del raw  # its edges are in the way of what follows
        progress("clean", 1, 1)
        _build(place, graphs, config, progress)
    return path


def _load(config: DataSection, digests: dict[str, str], progress: Progress) -> RawGraph:
    """Return the raw graph; the generator's, saying why, where pubmed cannot be reached."""
    try:
        return replace(source_of(config.source).load(config, progress), digests=digests)
    except Unreachable as failure:
        if config.source != "pubmed":
            raise
        reason = f"generated in place of pubmed: {failure}"
    raw = source_of("synthetic").load(config, progress)
    return replace(raw, origin=f"{raw.origin}; {reason}", warnings=(*raw.warnings, reason))


def _unchanged(path: Path, config: DataSection, kind: str, digests: dict[str, str], progress: Progress) -> bool:
    """Return whether a store of these settings and raw files is there, to the last bit what was written."""
    try:
        manifest = open_store(path).manifest
    except (NotFound, InvalidInput):
        return False
    source = manifest["source"]
    if changed_settings(manifest, config) or source.get("digests") != digests or source.get("kind") != kind:
        return False
    damage = verify_store(path, progress)
    for problem in damage:
        get_logger().warning("%s; preparing the store again", problem)
    return not damage


def changed_settings(manifest: Mapping[str, Any], config: DataSection) -> list[str]:
    """Return the data settings in which a store's manifest differs from `config`, where that changes what it holds."""
    stored, wanted = manifest["config"], config.model_dump(mode="json")
    return sorted(key for key in wanted if key not in _NO_CONTENT and stored.get(key) != wanted[key])


def _build(path: Path, graphs: list[tuple[RawGraph, dict[str, int]]], config: DataSection, progress: Progress) -> None:
    """Split, check and write the store of a cleaned graph, which is taken out of its list: nobody else keeps its edges."""
    graph, cleanup = graphs.pop()
    progress("split", 0, 1)
    split, notes = make_split(graph, config)
    progress("split", 1, 1)
    progress("check", 0, 1)
    checks, doubts = check_split(graph, split, true_citations(graph))
    progress("check", 1, 1)
    manifest: dict[str, Any] = {
        "name": graph.name,
        "directed": graph.directed,
        "source": {
            "kind": graph.kind, "origin": graph.origin, "licence": graph.licence, "digests": graph.digests,
        },
        "config": config.model_dump(mode="json"),
        "counts": _counts(graph, split),
        "cleanup": cleanup,
        "checks": checks,
        "warnings": [*graph.warnings, *notes, *doubts],
    }  # fmt: skip
    graph = replace(graph, edges=np.empty((2, 0), np.int32))  # in the split now; a quarter of a GiB at citation2's size
    with StoreWriter(path) as writer:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(_write_features, writer, graph, config, progress)
            indptr, indices = _write_edges(writer, split, graph.num_nodes)
            features = writing.result()
        manifest["counts"]["graph_edges"] = len(indices)
        if graph.year is not None:
            writer.put("year", graph.year, np.int32)
        del graph, split, writing  # with the negatives, a GiB at citation2's size
        _write_aggregates(writer, indptr, indices, features, config.neighbour_max, progress)
        writer.commit(manifest, progress)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Hold the lock of this store, so that two commands do not prepare it at once; clears what a killed one left.

    Yields the place to write to. Raises Conflict, before anything is fetched or made, when something else is there.
    """
    refuse_other(path)
    place = Path(os.path.realpath(path))  # a link stays: what it leads to is replaced
    make_folder(place.parent)
    with _locked(place.parent / f".{place.name}.lock"):
        for left in place.parent.glob(f".{glob.escape(place.name)}.????????.partial"):
            shutil.rmtree(left)
        yield place


def _locked(file: Path) -> IO[str]:
    """Return `file`, open and locked; closing it unlocks. Says so when it has to wait."""
    with naming(file):
        lock = file.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("waiting for %s: another command is preparing this store", file)
            fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _counts(graph: RawGraph, split: Split) -> dict[str, Any]:
    negatives = [held.negatives for held in (split.valid, split.test)]
    return {
        "nodes": graph.num_nodes,
        "train_edges": split.train.shape[1],
        "features": 0 if graph.features is None else graph.features.shape[1],
        "valid": len(split.valid.edge),
        "test": len(split.test.edge),
        "negatives_per_query": None if negatives[0] is None else negatives[0].shape[1],
        "years": None if graph.year is None else [int(graph.year.min()), int(graph.year.max())],
    }


def _write_edges(writer: StoreWriter, split: Split, num_nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Write training and held-out edges and the message-passing graph; return indptr [N+1] and indices [M] of the last."""
    train = csr.from_pairs(split.train, num_nodes)
    message = csr.symmetric(train)
    indptr = writer.put("indptr", message.indptr, np.int64)
    indices = writer.put("indices", message.indices, np.int32)
    writer.put("train_indptr", train.indptr, np.int64)
    writer.put("train_source", train.rows(), np.int32)
    writer.put("train_target", train.indices, np.int32)
    for name, held in (("valid", split.valid), ("test", split.test)):
        writer.put(f"{name}_edge", held.edge, np.int32)
        if held.negatives is not None:
            writer.put(f"{name}_negatives", held.negatives, np.int32)
        if held.pool is not None:
            writer.put(f"{name}_pool", held.pool, np.int32)
    return indptr, indices


def _write_features(writer: StoreWriter, graph: RawGraph, config: DataSection, progress: Progress) -> NDArray[Any]:
    """Write the features [N, F], rows normalised as asked; all-zero rows stay zero. Without any, F is 0."""
    raw = graph.features if graph.features is not None else np.zeros((graph.num_nodes, 0), np.float32)
    out = writer.allocate("features", raw.shape, config.feature_type)

    def write(first: int) -> int:
        block = raw[first : first + _ROWS].astype(np.float32, copy=False)
        if config.row_normalise != "none":
            order = 1 if config.row_normalise == "l1" else 2
            with np.errstate(over="ignore"):
                norm = np.linalg.norm(block, ord=order, axis=1, keepdims=True)
            if not np.isfinite(norm).all():  # squares of large features do not fit float32
                norm = np.linalg.norm(block.astype(np.float64), ord=order, axis=1, keepdims=True)
            block = np.divide(block, norm, out=np.zeros_like(block), where=norm > 0, casting="same_kind")
        with np.errstate(over="ignore"):
            out[first : first + _ROWS] = block
        if out.dtype != np.float32 and not np.isfinite(out[first : first + _ROWS]).all():
            raise InvalidInput(
                f"{graph.name}: features do not fit {config.feature_type}; set data.feature_type=float32"
            )
        return min(len(raw), first + _ROWS)

    _in_blocks(write, "features", len(raw), progress)
    writer.seal("features")
    return out


def _in_blocks(write: Callable[[int], int], stage: str, rows: int, progress: Progress) -> None:
    """Let all cores write blocks of rows, each named by its first row; `write` returns the row after its last."""
    with ThreadPoolExecutor(max(1, int(usable_cores()))) as pool:  # numpy and the kernels release the GIL
        for last in pool.map(write, range(0, rows, _ROWS)):
            progress(stage, last, rows)


def _write_aggregates(
    writer: StoreWriter, indptr: NDArray[Any], indices: NDArray[Any], features: NDArray[Any], maximum: bool,
    progress: Progress,
) -> None:  # fmt: skip
    """Write the sum (and maximum) of the stored features over each node's row: float32 [N, F], 0 for isolated nodes."""
    graph = Graph(indptr, indices)

    def write(out: NDArray[np.float32], aggregator: Aggregator, first: int) -> int:
        last = min(len(out), first + _ROWS)
        out[first:last] = aggregate_range(graph, features, first, last, aggregator)
        return last

    kinds: list[tuple[str, Aggregator]] = [("neighbour_sum", "sum"), ("neighbour_max", "max")]
    for name, aggregator in kinds if maximum else kinds[:1]:
        out = writer.allocate(name, features.shape, np.float32)
        _in_blocks(partial(write, out, aggregator), name, len(out), progress)
        writer.seal(name)
