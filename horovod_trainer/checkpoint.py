"""Checkpoints: a folder a step, complete or none, found by a pointer that is written last (L3).

`checkpoints/step-00000123-1f2e3d4c/` holds one safetensors file per group of tensors and, written last, state.json with
the size and SHA-256 of each, and its own; `checkpoints/LATEST` names the folder. Every file is synced before the next one
relies on it. No name is ever used twice, so a network file system's client that still holds what a
name meant before reads nothing stale; nothing is believed because of where it lies, only because its digests are right.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from horovod_trainer.console import get_logger
from horovod_trainer.documents import digest, make_folder, sync, write_atomic
from horovod_trainer.errors import Conflict, InvalidInput, Problem, TrainerError, naming

FOLDER, POINTER, STATE, LOCK = "checkpoints", "LATEST", "state.json", ".lock"
FORMAT = 1
FOREIGN_LOCK_SECONDS = 120.0  # NFS servers give a silent client's locks free after 90 s
_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")
# no lock manager on this file system: the run goes on without the lock
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Tensors = Mapping[str, torch.Tensor]
log = get_logger()


@dataclass(frozen=True)
class Checkpoint:
    """What a run is made of at one step: state (JSON, with `step`) and groups of tensors by name.

    skipped: the folders of later ones, which are damaged.
    """

    state: dict[str, Any]
    groups: dict[str, Tensors]
    folder: Path | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    folder: Path
    state: dict[str, Any]

    @property
    def serial(self) -> int:
        return int(self.state["serial"])


class Checkpoints:
    """The checkpoints of one run folder; one process, rank 0's, writes there at a time."""

    def __init__(self, run: Path, keep_last: int, keep_best: int) -> None:
        self.folder = run / FOLDER
        self.keep_last, self.keep_best = keep_last, keep_best
        self.skipped: frozenset[str] = frozenset()  # step folders that were found damaged: kept no longer
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Become the one who writes here until `unlock`, or the process's end; raises Conflict, naming who else does.

        Waits where that one is on another host: a file server needs a while to notice that a host is gone.
        """
        make_folder(self.folder)
        with naming(self.folder / LOCK):
            self._take(self.folder / LOCK)

    def _take(self, place: Path) -> None:
        file = place.open("a+")
        until = time.monotonic() + FOREIGN_LOCK_SECONDS
        while not _locked(file):
            owner = _owner(file)
            if owner.endswith(f" on {socket.gethostname()}") or time.monotonic() > until:
                raise Conflict(Problem(str(self.folder.parent), f"a run is writing there: {owner}"))
            log.info("waiting up to %d s for %s, which writes to %s", FOREIGN_LOCK_SECONDS, owner, self.folder.parent)
            time.sleep(5.0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        """Let others write here; calling again does nothing."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def save(self, checkpoint: Checkpoint) -> Path:
        """Commit a checkpoint and remove those that are not kept any more; return its folder.

        Raises TrainerError when the disk does not take it: what was there before is intact.
        """
        step = int(checkpoint.state["step"])
        place = self.folder / f"step-{step:08d}-{secrets.token_hex(4)}"
        earlier: list[_Entry] = []
        try:
            earlier = _entries(self.folder)
            serial = 1 + max((entry.serial for entry in earlier), default=0)
            make_folder(place)
            state = {"format": FORMAT, **checkpoint.state, "serial": serial, "files": _write(place, checkpoint.groups)}
            write_atomic(place / STATE, json.dumps(state | {"digest": digest(state)}, indent=1) + "\n")
            sync(self.folder)
            write_atomic(self.folder / POINTER, json.dumps({"folder": place.name, "step": step}) + "\n")
        except OSError as failure:
            if not (place / STATE).exists():  # else it is whole, and the pointer may name it already
                shutil.rmtree(place, ignore_errors=True)
            there = f"step {earlier[-1].state['step']}'s is intact" if earlier else "there was none before"
            reason = failure.strerror or str(failure)
            advice = "with room and rights to write there, --resume auto goes on"
            message = f"the checkpoint of step {step} could not be written: {reason}; {there}; {advice}"
            raise TrainerError(Problem(str(failure.filename or place), message)) from None
        self._retire([*earlier, _Entry(place, state)])
        return place

    def _retire(self, entries: Sequence[_Entry]) -> None:
        """Remove all but the last ones and the best ones, and what a killed save left."""
        whole = [entry for entry in entries if entry.folder.name not in self.skipped]
        last = whole[-self.keep_last :]
        judged = [entry for entry in whole if entry.state.get("value") is not None]
        best = sorted(judged, key=lambda entry: (-entry.state["value"], entry.serial))[: self.keep_best]
        kept = {entry.folder for entry in (*last, *best)}
        for folder in _folders(self.folder):
            if folder not in kept:
                with suppress(OSError):  # state.json first: a folder without it is no checkpoint
                    (folder / STATE).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
        sweep(self.folder)

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the pointer names or, where that is not whole, the last one that is; None: none.

        Raises InvalidInput, with what is wrong with each, where there are checkpoints and none is whole.
        """
        order = sorted(_folders(self.folder), key=lambda folder: _serial(folder), reverse=True)
        pointed, problem = self._pointed()
        if problem is not None:
            log.warning("%s; looking for the last whole checkpoint", problem)
        if pointed is not None:
            order = [pointed, *(folder for folder in order if folder != pointed)]
        problems = [problem] if problem is not None else []
        skipped: list[str] = []
        for folder in order:
            if not (folder / STATE).exists() and folder != pointed:
                continue  # a save that was killed: never a checkpoint
            try:
                return replace(read_checkpoint(folder), skipped=tuple(skipped))
            except InvalidInput as failure:
                log.warning("%s", failure)
                problems += failure.problems
                skipped.append(folder.name)
        if problems:
            raise InvalidInput(problems)
        return None

    def _pointed(self) -> tuple[Path | None, Problem | None]:
        """Return the folder that the pointer names, or what is wrong with the pointer."""
        file = self.folder / POINTER
        try:
            name = str(json.loads(_read(file))["folder"])
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError as failure:
            return None, Problem(str(file), f"cannot be read: {failure.strerror or failure}")
        except (ValueError, KeyError, TypeError, RecursionError):
            return None, Problem(str(file), "is damaged")
        if not _NAME.fullmatch(name):
            return None, Problem(str(file), "names no checkpoint", name)
        return self.folder / name, None


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed writers left; only where one holds the lock."""
    for left in folder.glob(".*.tmp"):
        with suppress(OSError):
            left.unlink()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a step folder after comparing every size and digest; raises InvalidInput naming all flaws."""
    from safetensors.torch import load

    state = _state(folder)
    if isinstance(state, Problem):
        raise InvalidInput(state)
    groups: dict[str, Tensors] = {}
    problems = []
    for name, entry in state["files"].items():
        file = folder / name
        try:
            content = _read(file)
        except FileNotFoundError:
            problems.append(Problem(str(file), "is missing"))
            continue
        except OSError as failure:
            problems.append(Problem(str(file), f"cannot be read: {failure.strerror or failure}"))
            continue
        if len(content) != entry["bytes"]:
            problems.append(Problem(str(file), f"is damaged: {entry['bytes']} bytes were committed", len(content)))
        elif _sha256(content) != entry["sha256"]:
            problems.append(Problem(str(file), "is damaged: its content is not what was committed"))
        else:
            groups[file.stem] = load(content)
    if problems:
        raise InvalidInput(problems)
    return Checkpoint(state, groups, folder)


def _state(folder: Path) -> dict[str, Any] | Problem:
    """Return a step folder's state, or what is wrong with it."""
    file = folder / STATE
    try:
        state = json.loads(_read(file))
    except (FileNotFoundError, NotADirectoryError):
        return Problem(str(folder), f"is no checkpoint: it has no {STATE}")
    except OSError as failure:
        return Problem(str(file), f"cannot be read: {failure.strerror or failure}")
    except (ValueError, RecursionError):
        return Problem(str(file), "is damaged: it is not JSON")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return Problem(str(file), f"is not of format {FORMAT}: another version of this program wrote it")
    committed = state.pop("digest", None)
    if committed is None or _digest(state) != committed:
        return Problem(str(file), "is damaged: its content is not what was committed")
    kinds = {"step": int, "serial": int, "files": dict}
    odd = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not odd:
        files = state["files"].items()
        odd = [
            name for name, entry in files
            if Path(name).name != name or not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys()
        ]  # fmt: skip
    return Problem(str(file), f"is damaged at {', '.join(odd)}") if odd else state


def _digest(state: Any) -> str | None:
    """Return the digest of a state, None where it can have none: Python reads NaN, which is not JSON."""
    try:
        return digest(state)
    except ValueError:
        return None


def _write(place: Path, groups: Mapping[str, Tensors]) -> dict[str, dict[str, Any]]:
    """Write every group to a synced file; return each file's size and digest."""
    from safetensors.torch import save

    files = {}
    for group, tensors in groups.items():
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        file = place / f"{group}.safetensors"
        with naming(file), file.open("xb", buffering=0) as out:
            left = memoryview(content)
            while left:  # a disk that fills up takes the first part, and complains at the second
                left = left[out.write(left) :]
            os.fsync(out.fileno())
        files[file.name] = {"bytes": len(content), "sha256": _sha256(content)}
    sync(place)
    return files


def _read(file: Path) -> bytes:
    """Return a file's bytes; opened again where a network file system says that the file it knew was replaced."""
    try:
        return file.read_bytes()
    except OSError as failure:
        if failure.errno != errno.ESTALE:
            raise
        return file.read_bytes()


def _folders(folder: Path) -> list[Path]:
    """Return the step folders, whole or not."""
    try:
        return [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _entries(folder: Path) -> list[_Entry]:
    """Return the checkpoints that were committed, in the order of their commits."""
    states = [(place, _state(place)) for place in _folders(folder)]
    entries = [_Entry(place, state) for place, state in states if not isinstance(state, Problem)]
    return sorted(entries, key=lambda entry: entry.serial)


def _serial(folder: Path) -> int:
    state = _state(folder)
    return 0 if isinstance(state, Problem) else int(state["serial"])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _locked(file: IO[str]) -> bool:
    """Return whether the lock is ours now; where there are no locks at all, the user must see to it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        if failure.errno not in _NO_LOCKS:
            raise
        log.warning("%s: this file system has no locks; see to it that no other run writes there", file.name)
    return True


def _owner(file: IO[str]) -> str:
    with suppress(OSError):
        file.seek(0)
        return file.read(200) or "it does not say who"
    return "it does not say who"
