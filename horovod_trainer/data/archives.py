"""Archives from elsewhere, unpacked without path tricks, links or bombs."""

from __future__ import annotations

import errno
import lzma
import shutil
import stat
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.errors import InvalidInput, Problem, naming


@dataclass(frozen=True)
class Member:
    """One entry of an archive; open() is the only way in which its bytes are read."""

    name: str
    size: int
    regular: bool
    folder: bool
    open: Callable[[], IO[bytes] | None]


def unpack(
    archive: Path, folder: Path, limit: int, progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Unpack a zip or tar archive into the new folder `folder`; return the files, relative to it.

    Raises InvalidInput naming every entry with an absolute path, a `..`, a link or a device, or when the files together
    exceed `limit` bytes, stated or real. Nothing is left behind then.
    """
    with refusing_damage(archive.name), _members(archive) as members:
        problems = [Problem(f"{archive.name}: {member.name}", fault) for member in members if (fault := _fault(member))]
        files = [member for member in members if member.regular]
        total = sum(member.size for member in files)
        if total > limit:
            problems.append(Problem(archive.name, f"holds {total} bytes, more than the {limit} expected"))
        if problems:
            raise InvalidInput(problems)
        folder.mkdir(parents=True)
        try:
            done = 0
            for member in files:
                done = _extract(archive, member, folder, done, limit)
                if progress:
                    progress("unpack", done, total)
        except BaseException:
            shutil.rmtree(folder)
            raise
    return [Path(member.name) for member in files]


def _fault(member: Member) -> str | None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")) or "\0" in member.name:
        return "leads out of the folder"
    if not member.regular and not member.folder:
        return "is a link or a device"
    return None


def _extract(archive: Path, member: Member, folder: Path, done: int, limit: int) -> int:
    """Write one file; return the bytes written so far, which count against the limit whatever the headers say."""
    target = folder / member.name
    with refusing_damage(f"{archive.name}: {member.name}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        source = member.open()
        if source is None:
            raise InvalidInput(Problem(f"{archive.name}: {member.name}", "cannot be read"))
        with source, target.open("xb") as out:
            while block := source.read(1 << 20):
                done += len(block)
                if done > limit:
                    raise InvalidInput(Problem(archive.name, f"unpacks to more than the {limit} bytes expected"))
                with naming(target):
                    out.write(block)
    return done


# all that zipfile, tarfile, their decompressors and numpy raise on bytes that are not what they should be
_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, KeyError, OverflowError,
    RuntimeError, MemoryError, FileExistsError, NotADirectoryError,
)  # fmt: skip
_NO_HEADER = (TypeError, IndexError, SyntaxError, tokenize.TokenError)  # of an array, which numpy evaluates as Python


@contextmanager
def refusing_damage(name: str) -> Iterator[None]:
    """Raise InvalidInput naming `name` for whatever damaged bytes make their readers raise; real I/O errors pass."""
    try:
        yield
    except _DAMAGE as failure:
        raise InvalidInput(Problem(name, f"damaged: {failure or type(failure).__name__}")) from None
    except OSError as failure:
        # bz2 gives no number, and an offset before the file's beginning is an invalid argument
        if failure.errno not in (None, errno.EINVAL):
            raise
        raise InvalidInput(Problem(name, f"damaged: {failure.strerror or failure}")) from None


def read_npz(file: Path, wanted: Container[str]) -> dict[str, NDArray[Any]]:
    """Return the wanted arrays of a numpy archive; raises InvalidInput when it is damaged or holds pickled ones."""
    with file.open("rb") as stream:
        start = stream.read(2)
    if start != b"PK" or not zipfile.is_zipfile(file):  # numpy goes by the beginning, zipfile by the end
        raise InvalidInput(Problem(str(file), "not an npz archive"))
    # opened here: numpy leaves open what it opens itself, when the archive's directory is damaged
    with refusing_damage(str(file)), file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        names = [name for name in archive.files if name in wanted]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidInput([Problem(f"{file}: {name}", "stands in the archive twice") for name in twice])
        try:
            arrays = {name: archive[name] for name in names}
        except ValueError as failure:
            if "allow_pickle" not in str(failure):
                raise
            raise InvalidInput(Problem(str(file), "holds pickled objects, which are never loaded")) from None
        except _NO_HEADER as failure:
            raise InvalidInput(Problem(str(file), f"damaged: {failure}")) from None
    odd = [name for name in names if not isinstance(arrays[name], np.ndarray)]  # numpy gives what is no array as bytes
    if odd:
        raise InvalidInput([Problem(f"{file}: {name}", "damaged: is no array") for name in odd])
    return arrays


@contextmanager
def _members(archive: Path) -> Iterator[list[Member]]:
    """Yield the entries of a zip or tar archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as box:
            yield [_zip_member(box, entry) for entry in box.infolist()]
        return
    try:
        with tarfile.open(archive) as tape:
            yield [_tar_member(tape, entry) for entry in tape.getmembers()]
    except (tarfile.ReadError, EOFError) as failure:
        raise InvalidInput(Problem(str(archive), f"neither a zip nor a tar archive: {failure}")) from None


def _zip_member(box: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Member:
    mode = entry.external_attr >> 16  # 0 where the packer was not a Unix one
    plain = stat.S_IFMT(mode) in (0, stat.S_IFREG)
    return Member(
        entry.filename, entry.file_size, plain and not entry.is_dir(), entry.is_dir(), lambda: box.open(entry)
    )


def _tar_member(tape: tarfile.TarFile, entry: tarfile.TarInfo) -> Member:
    return Member(entry.name, entry.size, entry.isreg(), entry.isdir(), lambda: tape.extractfile(entry))


def read_members(archive: Path, names: list[str], limit: int) -> dict[str, bytes]:
    """Return the named files of a zip or tar archive without unpacking it; each at most `limit` bytes.

    Raises InvalidInput for a file that is missing or larger.
    """
    found: dict[str, bytes] = {}
    with refusing_damage(archive.name), _members(archive) as members:
        for member in members:
            source = member.open() if member.name in names and member.regular else None
            if source is not None:
                with source:
                    found[member.name] = source.read(limit + 1)
    wrong = [
        Problem(f"{archive.name}: {name}", "larger than expected" if name in found else "is not in the archive")
        for name in names
        if len(found.get(name, b"")) > limit or name not in found
    ]
    if wrong:
        raise InvalidInput(wrong)
    return found
