"""Staging: a store that lies far away is copied to this node's disk once, whole and checked, and found there later.

In the stage folder, `DIGEST/` is a store, there only once every byte was right. `DIGEST.lock` is held, shared, by every
process that uses it; its time says when that began last. `.lock` is held by the one that copies or makes room, and
`DIGEST.partial`, found while holding it, is what a killed one left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from horovod_trainer.config import DataSection
from horovod_trainer.console import counted, get_logger
from horovod_trainer.data.store import MANIFEST, Store, open_store, read_manifest
from horovod_trainer.documents import sync
from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Problem, naming

Progress = Callable[[str, int, int], None]  # stage, done, total
COPYING, WAITING = "copy the store to this node, MiB", "another process copies the store to this node, MiB"
BLOCK = 1 << 22  # bytes read, hashed and written at a time
_POLL_SECONDS = 0.2
_DIGEST = re.compile("[0-9a-f]{64}")

log = get_logger()


@dataclass(frozen=True)
class Lease:
    """An open store; while this object lives, its local copy, if it has one, is not removed to make room."""

    store: Store
    lock: IO[str] | None = None


@dataclass(frozen=True)
class _Source:
    """A store to be copied: its folder, manifest, (bytes, sha256) of every array file, and their sum of bytes."""

    path: Path
    manifest: dict[str, Any]
    files: dict[str, tuple[int, str]]
    size: int


def acquire(config: DataSection, progress: Progress) -> Lease:
    """Return the store at data.store, open; with data.stage, the copy of it on this node, made unless it is there.

    Of the processes of a node one copies and the others wait. When the copy is there, data.store's manifest is all that
    is read from afar. The result's path and manifest are data.store's. Least recently used copies are removed to make
    room, never one in use. Raises NotFound, InvalidInput and Conflict in one line each, OSError; a copy that fails
    leaves nothing behind.
    """
    path = Path(config.store)
    if config.stage is None:
        return Lease(open_store(path))
    source = _read_source(path)
    stage = _stage_folder(Path(config.stage), path)
    with ExitStack() as held:
        place = stage / source.manifest["digest"]
        lock = held.enter_context(_lock_of(place))
        fcntl.flock(lock, fcntl.LOCK_SH)  # only one that removes it can be in the way, and not for long
        store = _open_copy(place, source)
        if store is None:
            with _alone(stage, place, source.size, progress):
                store = _open_copy(place, source) or _copy(source, place, config.stage_limit_gib, progress)
        os.utime(lock.fileno())
        held.pop_all()
    return Lease(replace(store, path=path, manifest=source.manifest), lock)


def _read_source(path: Path) -> _Source:
    """Return what is to be copied, from the manifest alone; its digest is a folder's name below and must be one."""
    manifest = read_manifest(path)
    arrays = manifest["arrays"]
    files = {file: (entry.get("bytes"), entry.get("sha256")) for file, entry in arrays.items()}
    odd = [file for file, (size, digest) in files.items() if not (type(size) is int and isinstance(digest, str))]
    odd += [] if _DIGEST.fullmatch(manifest["digest"]) else ["digest"]
    if odd:
        raise InvalidInput(Problem(str(path / MANIFEST), f"damaged: not what prepare writes at {', '.join(odd)}"))
    return _Source(path, manifest, files, sum(size for size, _ in files.values()))


def _stage_folder(stage: Path, source: Path) -> Path:
    """Return data.stage, made if need be, but not the folders above it: a disk that is not mounted must be noticed."""
    if Path(os.path.realpath(stage)).is_relative_to(os.path.realpath(source)):
        raise InvalidInput(Problem("data.stage", "is the store itself or in it; name a folder elsewhere", str(stage)))
    try:
        stage.mkdir(exist_ok=True)
    except FileNotFoundError:
        message = f"cannot be made: {stage.parent} is missing; make it, or mount the disk, or change data.stage"
        raise NotFound(Problem(str(stage), message)) from None
    except (FileExistsError, NotADirectoryError):
        raise Conflict(Problem(str(stage), "cannot be made a folder: a file is in the way")) from None
    return stage


def _lock_of(place: Path) -> IO[str]:
    """Return the file to lock for the copy at `place`; it stays when the copy goes, or two could hold its lock."""
    return place.with_name(f"{place.name}.lock").open("a")


def _locked_at_once(lock: IO[str]) -> bool:
    """Return whether the exclusive lock could be had without waiting."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_copy(place: Path, source: _Source) -> Store | None:
    """Return the copy at `place`, or None without one, or where it is not whole or not what the source's manifest says."""
    try:
        store = open_store(place)
    except (NotFound, InvalidInput):
        return None
    same = all(store.manifest[key] == source.manifest[key] for key in ("arrays", "directed"))
    return store if same else None


@contextmanager
def _alone(stage: Path, place: Path, size: int, progress: Progress) -> Iterator[None]:
    """Hold the stage folder's lock, showing meanwhile how far the one that has it is; clears what a killed one left."""
    with (stage / ".lock").open("a") as lock:
        if not _locked_at_once(lock):
            log.info("waiting for %s: another process on this node is copying", place)
            total = max(1, size >> 20)
            while not _locked_at_once(lock):
                progress(WAITING, min(size - 1, _bytes_in(_partial(place))) * total // size, total)
                time.sleep(_POLL_SECONDS)
            progress(WAITING, total, total)
        for left in stage.glob("*.partial"):
            if _DIGEST.fullmatch(left.stem):
                shutil.rmtree(left)
        yield


def _partial(place: Path) -> Path:
    return place.with_name(f"{place.name}.partial")


def _bytes_in(folder: Path) -> int:
    """Return the sum of the sizes of a folder's files; 0 without one, and less while they go."""
    total = 0
    with suppress(FileNotFoundError):
        for file in folder.iterdir():
            total += file.stat().st_size
    return total


def _copy(source: _Source, place: Path, limit_gib: float | None, progress: Progress) -> Store:
    """Copy a store to `place`, comparing every digest on the way, and return it open; all or nothing."""
    _check_sizes(source)
    if place.exists():
        log.warning("%s is damaged: copying the store again", place)
        _remove(place)
    _make_room(source, place, limit_gib)
    partial = _partial(place)
    log.info("copying %s (%s) to %s", source.path, _gib(source.size), place)
    started = time.monotonic()
    try:
        partial.mkdir()
        _copy_files(source, partial, progress)
        with naming(partial / MANIFEST):
            (partial / MANIFEST).write_text(json.dumps(source.manifest, indent=1) + "\n", "utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        store = _open_whole(source, partial)
        os.rename(partial, place)  # what is mapped stays mapped
    except BaseException:  # Ctrl-C leaves no litter either
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(place.parent)
    seconds = time.monotonic() - started
    log.info("copied in %.1f s, %s/s", seconds, _gib(source.size / max(seconds, 1e-9)))
    return store


def _check_sizes(source: _Source) -> None:
    """Raise InvalidInput naming every file that is missing or of another size than its manifest says."""
    problems = []
    for file, (size, _) in sorted(source.files.items()):
        where = source.path / file
        try:
            got = where.stat().st_size
        except FileNotFoundError:
            problems.append(Problem(str(where), "missing; prepare the store again"))
            continue
        if got != size:
            problems.append(Problem(str(where), f"damaged: the manifest says {size} bytes", got))
    if problems:
        raise InvalidInput(problems)


def _copy_files(source: _Source, partial: Path, progress: Progress) -> None:
    total, done = max(1, source.size >> 20), 0

    def advance(n: int) -> None:
        nonlocal done
        done += n
        progress(COPYING, done * total // source.size, total)

    for file, (_, expected) in sorted(source.files.items()):
        digest = _copy_file(source.path / file, partial / file, advance)
        if digest != expected:
            message = "damaged: its content is not what the manifest recorded; prepare the store again"
            raise InvalidInput(Problem(str(source.path / file), message, digest))
        sync(partial / file)


def _copy_file(source: Path, target: Path, advance: Callable[[int], None]) -> str:
    """Copy a file and return the SHA-256 of what was written; the source's pages leave the page cache behind us."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with source.open("rb", buffering=0) as reader, naming(target), target.open("xb") as writer:
        position = 0
        while True:
            with naming(source):
                n = reader.readinto(block) or 0
            if n == 0:
                return digest.hexdigest()
            digest.update(block[:n])
            writer.write(block[:n])
            os.posix_fadvise(reader.fileno(), position, n, os.POSIX_FADV_DONTNEED)  # it is read from here only once
            position += n
            advance(n)


def _open_whole(source: _Source, partial: Path) -> Store:
    """Return the copy, open; its bytes are the source's, so that whatever is wrong with it is wrong there."""
    try:
        return open_store(partial)
    except InvalidInput as failure:
        there = [
            replace(problem, path=problem.path.replace(str(partial), str(source.path))) for problem in failure.problems
        ]
        raise InvalidInput(there) from None


def _make_room(source: _Source, place: Path, limit_gib: float | None) -> None:
    """Remove least recently used copies until the source fits the limit and the free space.

    Raises, before anything is removed, InvalidInput where the limit is too small for the source alone, and Conflict
    where what is in use leaves no room.
    """
    stage = place.parent
    others = [other for other in stage.iterdir() if _DIGEST.fullmatch(other.name) and other != place]
    sizes = {other: _bytes_in(other) for other in sorted(others, key=_last_used)}
    free, limit = shutil.disk_usage(stage).free, None if limit_gib is None else int(min(limit_gib * 2**30, 2.0**63))
    over = max(source.size - free, 0 if limit is None else sum(sizes.values()) + source.size - limit)
    with ExitStack() as held:
        leaving, busy = [], []
        for other, size in sizes.items():
            if not _locked_at_once(held.enter_context(_lock_of(other))):
                busy.append(other)
            elif over > 0:
                leaving.append(other)
                over -= size
        if over > 0:
            said = f"the store at {source.path} needs {_gib(source.size)}, {_gib(free)} are free on the disk"
            said += "" if limit is None else f", data.stage_limit_gib is {limit_gib:g}"
            used = ", ".join(f"{other.name[:12]} ({_gib(sizes[other])})" for other in busy)
            said += f"; in use by running processes: {used or 'nothing'}"
            if limit is not None and source.size > limit:
                raise InvalidInput(Problem("data.stage_limit_gib", f"too small: {said}", limit_gib))
            raise Conflict(Problem(str(stage), f"has no room, even without all copies not in use: {said}"))
        for other in leaving:
            log.info("removing %s, least recently used of %s", other, counted(len(sizes), "copy", "copies"))
            _remove(other)


def _last_used(place: Path) -> float:
    try:
        return place.with_name(f"{place.name}.lock").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(place: Path) -> None:
    """Remove a copy; one that is killed while removing leaves a part that is known as such."""
    os.rename(place, _partial(place))
    shutil.rmtree(_partial(place))


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
