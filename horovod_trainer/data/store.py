"""The graph store: a folder of memory-mapped arrays and a manifest that vouches for each; open, verify, write."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from horovod_trainer.cores import usable_cores
from horovod_trainer.data import soundness
from horovod_trainer.documents import dump_canonical, make_folder, sync
from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Problem, naming

FORMAT = 1
MANIFEST = "manifest.json"
_KEYS: dict[str, type] = {
    "format": int, "name": str, "directed": bool, "source": dict, "config": dict, "counts": dict, "cleanup": dict,
    "checks": dict, "warnings": list, "arrays": dict, "digest": str,
}  # fmt: skip
_REQUIRED = (
    "indptr", "indices", "train_indptr", "train_source", "train_target", "features", "neighbour_sum",
    "valid_edge", "test_edge",
)  # fmt: skip
_OPTIONAL = ("neighbour_max", "year", "valid_negatives", "test_negatives", "valid_pool", "test_pool")
_FILES = frozenset(f"{name}.npy" for name in _REQUIRED + _OPTIONAL)
_BLOCK = 1 << 22  # bytes read, written or hashed at a time

SplitName = Literal["valid", "test"]


@dataclass(frozen=True)
class HeldOut:
    """Edges kept out of training: edge [Q, 2], with negative tails [Q, K] per edge or one shared pool [P, 2]."""

    edge: NDArray[np.int32]
    negatives: NDArray[np.int32] | None = None
    pool: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Store:
    """An open store; every array is read-only and memory-mapped, so that the ranks of a node share one copy.

    indptr int64 [N+1], indices int32 [M]: the symmetric message-passing graph. train_indptr int64 [N+1], train_source
    and train_target int32 [E]: the seeds. features float32|float16 [N, F], neighbour_sum and neighbour_max float32
    [N, F], year int32 [N].
    """

    path: Path
    manifest: dict[str, Any]
    num_nodes: int
    directed: bool
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    train_indptr: NDArray[np.int64]
    train_source: NDArray[np.int32]
    train_target: NDArray[np.int32]
    features: NDArray[Any]
    neighbour_sum: NDArray[np.float32]
    neighbour_max: NDArray[np.float32] | None
    year: NDArray[np.int32] | None
    _held_out: dict[str, HeldOut]

    def held_out(self, split: SplitName) -> HeldOut:
        """Return the held-out edges of a split."""
        return self._held_out[split]


def open_store(path: Path) -> Store:
    """Return the store in folder `path` after checking every file's size, dtype and shape against the manifest.

    Raises NotFound without a store, InvalidInput naming every file that is missing, not what the manifest says, or
    unsafe to use: ids that lead out of the graph, arrays that do not fit together. Only `verify_store` reads all bytes.
    """
    manifest = read_manifest(path)
    folder = path.stat().st_ino
    known = manifest["arrays"]
    arrays, problems = _open_arrays(path, known)
    problems += [
        Problem(str(path / MANIFEST), f"lists no {name}.npy") for name in _REQUIRED if f"{name}.npy" not in known
    ]
    if not problems and _store_digest(known, manifest["directed"]) != manifest["digest"]:
        problems.append(_altered(path))
    if not problems:
        problems += [
            Problem(str(path / f"{name}.npy"), f"damaged or swapped: {flaw}") for name, flaw in soundness.flaws(arrays)
        ]
    # Mapped anew: what the check has read would count as this process's memory, used or not (0.7 GiB of negatives).
    arrays, changed = _open_arrays(path, known)
    if path.stat().st_ino != folder:
        changed.append(Problem(str(path), "another store took its place while this one was checked; start again"))
    if problems or changed:
        raise InvalidInput(problems or changed)
    held_out = {
        split: HeldOut(arrays[f"{split}_edge"], arrays.get(f"{split}_negatives"), arrays.get(f"{split}_pool"))
        for split in ("valid", "test")
    }
    main = {name: arrays[name] for name in _REQUIRED if not name.endswith("_edge")}
    return Store(
        path=path, manifest=manifest, num_nodes=len(arrays["indptr"]) - 1, directed=manifest["directed"], **main,
        neighbour_max=arrays.get("neighbour_max"), year=arrays.get("year"), _held_out=held_out,
    )  # fmt: skip


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the store in `path`; raises NotFound without one, InvalidInput when damaged."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
        dump_canonical(manifest).encode()  # Python's reader takes NaN and halves of characters
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(Problem(str(path), "no store here; `prepare`, given the same -c and -s, makes it")) from None
    except IsADirectoryError:
        raise InvalidInput(Problem(str(file), "damaged: it is a folder")) from None
    except (ValueError, RecursionError) as failure:
        raise InvalidInput(Problem(str(file), f"damaged: {failure}")) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise InvalidInput(Problem(str(file), f"not a store of format {FORMAT}; prepare it again", got))
    missing = [key for key in _KEYS if key not in manifest]
    if missing:
        raise InvalidInput(Problem(str(file), f"damaged: lacks {', '.join(missing)}"))
    odd = [key for key, kind in _KEYS.items() if not isinstance(manifest[key], kind)]
    arrays = manifest["arrays"].items() if not odd else ()
    odd += [f"arrays: {name}" for name, entry in arrays if name not in _FILES or not isinstance(entry, dict)]
    if odd:
        raise InvalidInput(Problem(str(file), f"damaged: not what prepare writes at {', '.join(odd)}"))
    return manifest


def _is_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether a manifest's entry for a file has what it must have, each of its kind."""
    texts, shape = (entry.get("dtype"), entry.get("sha256")), entry.get("shape")
    if not (all(isinstance(text, str) for text in texts) and isinstance(shape, list)):
        return False
    return all(type(number) is int and number >= 0 for number in (entry.get("bytes"), *shape))


def _open_arrays(path: Path, entries: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], list[Problem]]:
    """Return the mapped arrays by name, and what is wrong with the files of the others."""
    opened = {file.removesuffix(".npy"): _open_array(path / file, entry) for file, entry in entries.items()}
    arrays = {name: array for name, array in opened.items() if not isinstance(array, Problem)}
    return arrays, [array for array in opened.values() if isinstance(array, Problem)]


def _open_array(file: Path, entry: Mapping[str, Any]) -> NDArray[Any] | Problem:
    """Return the mapped array, or what is wrong with the file at a glance: its size and its header."""
    try:
        if not _is_entry(entry):
            raise ValueError
        shape, dtype, size = tuple(entry["shape"]), np.dtype(entry["dtype"]), entry["bytes"]
        header = _header(shape, dtype)
        # kernels know no foreign byte order, and a mapping must not lead beyond the file
        if dtype.kind not in "if" or not dtype.isnative or size != len(header) + math.prod(shape) * dtype.itemsize:
            raise ValueError
    except (TypeError, ValueError, SyntaxError):  # the last: numpy evaluates types with a comma
        return Problem(str(file.parent / MANIFEST), f"damaged: its entry for {file.name}")
    try:
        with file.open("rb") as stream:
            got, start = os.fstat(stream.fileno()).st_size, stream.read(len(header))
    except FileNotFoundError:
        return Problem(str(file), "missing; prepare the store again")
    except IsADirectoryError:
        return Problem(str(file), "is a folder; prepare the store again")
    if got != size:
        kind = "truncated" if got < size else "too long"
        return Problem(str(file), f"{kind}: the manifest says {size} bytes", got)
    if start != header:  # compared, not parsed: a damaged header is no Python literal
        return Problem(str(file), f"does not begin as an array of {dtype} {list(shape)}; damaged or swapped")
    if 0 in shape:  # nothing to map
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(file, dtype, "r", len(header), shape))  # a view: indexing a memmap makes memmaps


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the bytes with which numpy begins the file of such an array."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return out.getvalue()


def verify_store(path: Path, progress: Callable[[str, int, int], None] | None = None) -> list[Problem]:
    """Return what is wrong after reading every byte: files missing, truncated, swapped or changed, an altered manifest.

    Raises NotFound or InvalidInput only where the manifest itself cannot be read.
    """
    manifest = read_manifest(path)
    arrays: dict[str, dict[str, Any]] = manifest["arrays"]
    owner = {entry["sha256"]: file for file, entry in arrays.items() if _is_entry(entry)}
    found: list[Problem] = []
    for number, (file, entry) in enumerate(sorted(arrays.items())):
        where = path / file
        glance = _open_array(where, entry)
        digest = file_sha256(where) if where.is_file() else None
        if digest != entry.get("sha256") and owner.get(digest or "") not in (None, file):
            found.append(Problem(str(where), f"swapped: it holds what belongs in {owner[digest or '']}"))
        elif isinstance(glance, Problem):
            found.append(glance)
        elif digest != entry.get("sha256"):
            found.append(Problem(str(where), "damaged: its content is not what the manifest recorded", digest))
        if progress:
            progress("verify", number + 1, len(arrays))
    if _store_digest(arrays, manifest["directed"]) != manifest["digest"]:
        found.append(_altered(path))
    return found


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _altered(path: Path) -> Problem:
    return Problem(str(path / MANIFEST), "altered: its digest is not that of its array entries and `directed`")


def _store_digest(arrays: Mapping[str, Mapping[str, Any]], directed: bool) -> str:
    """Return the identity of what the store holds, wherever it lies and whatever it was made from."""
    lines = f"directed {directed}\n" + "".join(
        f"{entry.get('sha256')}  {file}\n" for file, entry in sorted(arrays.items())
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def unnamed_array(folder: Path, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a writable array on the disk of `folder`, in a file without a name: it goes when the array goes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size == 0:  # nothing to map
        return np.zeros(shape, dtype)
    make_folder(folder)
    with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, dtype, "r+", 0, shape))


def write_back(array: NDArray[Any]) -> None:
    """Begin to bring an array of `unnamed_array` to its disk: what lies there the kernel may drop. Nobody waits for it."""
    if isinstance(array.base, np.memmap):
        threading.Thread(target=array.base.flush, name="write back").start()


class StoreWriter:
    """Builds a store in a folder beside its place; `commit` moves it there whole, leaving without it removes all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._sealed: dict[str, Future[dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        refuse_other(self.path)
        make_folder(self.path.parent)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        self._pool = ThreadPoolExecutor(max(1, int(usable_cores())))  # hashing and syncing release the GIL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)  # after a commit it is no longer there

    def allocate(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a writable array that is the file `name`.npy, to be filled in blocks and then sealed."""
        if name not in _REQUIRED + _OPTIONAL:
            raise ValueError(f"a store holds no array {name}")
        self._arrays[name] = (shape, np.dtype(dtype))
        file = self._folder / f"{name}.npy"
        header, size = _header(shape, np.dtype(dtype)), math.prod(shape) * np.dtype(dtype).itemsize
        with naming(file), file.open("wb") as out:
            out.write(header)
            out.flush()
            if size > 0:  # reserved now: a full disk is an error here, a bus error in a mapped page
                os.posix_fallocate(out.fileno(), len(header), size)
        if size == 0:  # nothing to map
            return np.zeros(shape, dtype)
        return np.asarray(np.memmap(file, dtype, "r+", len(header), shape))

    def put(self, name: str, array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
        """Write `array` converted to `dtype`, block by block, and seal it; return the mapped result."""
        out = self.allocate(name, array.shape, dtype)
        rows = max(1, _BLOCK // max(1, array[:1].nbytes))
        for first in range(0, len(array), rows):
            out[first : first + rows] = array[first : first + rows]
        self.seal(name)
        return out

    def seal(self, name: str) -> None:
        """Begin to digest an array and to bring it to disk, beside other work: its content is final."""
        self._sealed[name] = self._pool.submit(self._entry, name)

    def _entry(self, name: str) -> dict[str, Any]:
        file, (shape, dtype) = self._folder / f"{name}.npy", self._arrays[name]
        digest = file_sha256(file)
        sync(file)
        return {"shape": list(shape), "dtype": dtype.str, "bytes": file.stat().st_size, "sha256": digest}

    def commit(self, manifest: Mapping[str, Any], progress: Callable[[str, int, int], None] | None = None) -> None:
        """Wait for the digests, write the manifest last and move the folder into place, replacing an older store."""
        for name in self._arrays.keys() - self._sealed.keys():
            self.seal(name)
        arrays = {}
        for name, made in sorted(self._sealed.items()):
            arrays[f"{name}.npy"] = made.result()
            if progress:
                progress("digest", len(arrays), len(self._sealed))
        document = {
            "format": FORMAT,
            **manifest,
            "arrays": arrays,
            "digest": _store_digest(arrays, manifest["directed"]),
        }
        last = self._folder / MANIFEST
        with naming(last):
            last.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")
        sync(last)
        sync(self._folder)
        self._folder.chmod(0o755)  # mkdtemp's folders are private
        self._replace()

    def _replace(self) -> None:
        """Move the finished folder into place; the old one steps aside: no folder is renamed over a full one."""
        if not self.path.exists():
            os.rename(self._folder, self.path)
        else:
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
            os.rename(self.path, old / "old")
            os.rename(self._folder, self.path)
            shutil.rmtree(old)
        sync(self.path.parent)


def refuse_other(path: Path) -> None:
    """Raise Conflict unless a store may be written at `path`: where nothing is, over a store or an empty folder."""
    if os.path.lexists(path) and not (path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))):
        raise Conflict(Problem(str(path), "exists and is not a store; name another folder in data.store"))
    if Path.cwd().is_relative_to(os.path.realpath(path)):  # it would be moved away under the caller's feet
        raise Conflict(Problem(str(path), "is the current folder or above it; name another folder in data.store"))
