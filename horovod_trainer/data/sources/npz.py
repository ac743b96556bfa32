"""The npz source: a folder (or one file) of plain numpy archives, with a split of its own or without.

Graph members: edge_index [2, E] (row 0 cites row 1); optional num_nodes, node_year [N], directed, and features as x
[N, F] or as CSR parts x_data, x_indices, x_shape with x_indptr or x_rownnz. Split members (in the same or another
file): train_edge [2, E], source [Q], valid_target and test_target [Q], valid_target_neg and test_target_neg [Q, K].
Anything else, labels among it, is never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.config import DataSection
from horovod_trainer.data.archives import read_npz
from horovod_trainer.data.graph import RawGraph, Split, as_floats, as_ids
from horovod_trainer.data.sources import Progress
from horovod_trainer.data.store import HeldOut, file_sha256
from horovod_trainer.errors import InvalidInput, NotFound, Problem

_GRAPH = "edge_index"
_SPLIT = ("train_edge", "source", "valid_target", "test_target", "valid_target_neg", "test_target_neg")
_WANTED = frozenset(
    (
        _GRAPH,
        "num_nodes",
        "node_year",
        "directed",
        "x",
        "x_data",
        "x_indices",
        "x_indptr",
        "x_rownnz",
        "x_shape",
        *_SPLIT,
    )
)


def fingerprint(config: DataSection, progress: Progress) -> dict[str, str]:
    """Return the digests of the archives; raises NotFound when there are none."""
    return {file.name: file_sha256(file) for file in _files(config)}


def load(config: DataSection, progress: Progress) -> RawGraph:
    """Return the graph of the archives, and their split when they hold one."""
    files = _files(config)
    members: dict[str, NDArray[Any]] = {}
    for number, file in enumerate(files):
        for name, array in read_npz(file, _WANTED).items():
            if name in members:
                raise InvalidInput(Problem(str(file), f"{name} is in another file of the folder too"))
            members[name] = array
        progress("read", number + 1, len(files))
    where = str(files[0].parent if len(files) > 1 else files[0])
    if _GRAPH not in members:
        raise InvalidInput(Problem(where, f"no {_GRAPH} in any of {', '.join(file.name for file in files)}"))
    try:
        return _graph(where, ", ".join(file.name for file in files), members)
    except (TypeError, ValueError, IndexError, OverflowError, MemoryError) as failure:  # shapes without sense
        raise InvalidInput(Problem(where, f"the arrays do not fit together: {failure}")) from None


def _graph(where: str, origin: str, members: dict[str, NDArray[Any]]) -> RawGraph:
    features = _features(where, members)
    if "num_nodes" in members:
        num_nodes = _one(where, members, "num_nodes", "iu")
    elif features is not None:
        num_nodes = len(features)
    else:
        raise InvalidInput(Problem(where, "needs num_nodes or features: nodes without edges count too"))
    return RawGraph(
        name=Path(where).stem, kind="npz", origin=origin, licence="as stated by whoever made the files",
        num_nodes=num_nodes, edges=as_ids(f"{where}: {_GRAPH}", members[_GRAPH]),
        directed=bool(_one(where, members, "directed", "biu")) if "directed" in members else True,
        features=features, year=members.get("node_year"), split=_split(where, members),
    )  # fmt: skip


def _one(where: str, members: dict[str, NDArray[Any]], name: str, kinds: str) -> int:
    """Return the only number of an array whose type is one of numpy's `kinds`."""
    array = members[name]
    if array.size != 1 or array.dtype.kind not in kinds:
        wanted = "is true or false" if "b" in kinds else "is one whole number"
        raise InvalidInput(Problem(f"{where}: {name}", wanted, f"{array.dtype} {list(array.shape)}"))
    return int(array.item())


def _files(config: DataSection) -> list[Path]:
    assert config.path is not None  # config.py demands it for this source
    path = Path(config.path)
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise NotFound(Problem("data.path", "no .npz file here", config.path))
    # a surrogate stands for a byte that is no text: the manifest could not name the file
    problems = [
        Problem(str(file), "its name is not UTF-8 text; rename it")
        for file in files
        if any("\ud800" <= character <= "\udfff" for character in file.name)
    ]
    if problems:
        raise InvalidInput(problems)
    return files


def _features(where: str, members: dict[str, NDArray[Any]]) -> NDArray[Any] | None:
    """Return features [N, F], float32, or None."""
    if "x" in members:
        return as_floats(f"{where}: x", members["x"])
    if "x_data" not in members:
        return None
    data, columns = as_floats(f"{where}: x_data", members["x_data"]), members.get("x_indices")
    shape = members.get("x_shape")
    if columns is None or shape is None or not {"x_indptr", "x_rownnz"} & members.keys():
        raise InvalidInput(Problem(where, "x_data needs x_indices, x_shape and x_indptr or x_rownnz"))
    if "x_indptr" in members:
        rows_of = np.diff(as_ids(f"{where}: x_indptr", members["x_indptr"]))
    else:
        rows_of = as_ids(f"{where}: x_rownnz", members["x_rownnz"])
    n, width = (int(size) for size in shape)
    columns = as_ids(f"{where}: x_indices", columns)
    fits = len(rows_of) == n and rows_of.sum() == len(data) == len(columns) and (rows_of >= 0).all()
    if not fits or columns.min(initial=0) < 0 or columns.max(initial=0) >= width:
        raise InvalidInput(Problem(where, f"the parts of x do not make a [{n}, {width}] matrix"))
    out = np.zeros((n, width), np.float32)
    out[np.repeat(np.arange(n), rows_of), columns] = data
    return out


def _split(where: str, members: dict[str, NDArray[Any]]) -> Split | None:
    """Return the split among the members; None without one, InvalidInput for half of one."""
    have = [name for name in _SPLIT if name in members]
    if not have:
        return None
    if len(have) < len(_SPLIT):
        lacks = ", ".join(name for name in _SPLIT if name not in have)
        raise InvalidInput(Problem(where, f"half a split: lacks {lacks}"))
    ids = {name: as_ids(f"{where}: {name}", members[name]) for name in _SPLIT}
    held = []
    for name in ("valid", "test"):
        if ids["source"].shape != ids[f"{name}_target"].shape or ids["source"].ndim != 1:
            raise InvalidInput(Problem(where, f"source and {name}_target must be [Q] both"))
        edge = np.stack([ids["source"], ids[f"{name}_target"]], axis=1)
        held.append(HeldOut(edge, ids[f"{name}_target_neg"]))
    return Split(ids["train_edge"], *held)
