"""Gzipped CSV files of plain numbers: parsed by a kernel on all cores, and by pyarrow where anything else is in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # ships no types
from isal import igzip, igzip_lib, igzip_threaded
from numpy.typing import NDArray
from pyarrow import csv

from horovod_trainer.cores import usable_cores
from horovod_trainer.data.sources import Progress
from horovod_trainer.errors import InvalidInput, NotFound, Problem
from horovod_trainer.jit import compiled, inlined

_BLOCK = 1 << 21  # bytes of text parsed at a time
_LONGEST = 1 << 24  # bytes of a first line
_MOST_PER_BYTE = 516  # rows: deflate makes at most 1,032 bytes of one, and a row has two
_UNREADABLE: tuple[Any, ...] = (pa.ArrowException, igzip_lib.IsalError, ValueError, EOFError, OSError)
_POWERS = 10.0 ** np.arange(23)  # all that float64 holds exactly
_EXACT = 2**53  # as are whole numbers up to here: one division or product of exact numbers rounds once, correctly
_DIGITS = 18  # of a number in int64
_NEWLINE, _COMMA, _MINUS, _POINT, _PLUS, _ZERO, _EXPONENT, _CASE = b"\n,-.+0e "
# in kernels: an unsigned place needs no test for negative ones, which takes a third of the time
_byte, _whole, _place = (cast(Any, kind) for kind in (np.uint8, np.int64, np.uint64))
_ONE = _place(1)

Allocate = Callable[[tuple[int, int], type[np.generic]], NDArray[Any]]


def read_table(
    file: Path, rows: int | None, dtype: type[np.generic], progress: Progress, allocate: Allocate = np.empty
) -> NDArray[Any]:
    """Return a gzipped CSV of numbers as [rows, columns]; raises InvalidInput when it has not that many rows.

    rows None: as many as come in one block. An empty cell is NaN where the type has one; an empty line is no row.
    """
    out: NDArray[Any] | None = None
    done = 0
    try:
        columns = _columns(file)
        if rows is not None:
            size = file.stat().st_size
            if not 0 <= rows <= _MOST_PER_BYTE * size + 1:  # before so much is allocated
                raise InvalidInput(Problem(str(file), f"should hold {rows} rows, which no file of {size} bytes does"))
            out = allocate((rows, columns), dtype)
            if _read_plain(file, out, progress):
                return out
        for block in _blocks(file, columns, dtype):
            out = allocate(block.shape, dtype) if out is None else out
            if done + len(block) <= len(out):
                out[done : done + len(block)] = block
            done += len(block)
            progress(f"read {file.name}", min(done, len(out)), len(out))
    except FileNotFoundError:
        raise NotFound(Problem(str(file), "missing")) from None
    except _UNREADABLE as failure:
        if isinstance(failure, OSError) and failure.errno:  # the disk's fault, not the file's
            raise
        raise InvalidInput(Problem(str(file), f"not a readable gzipped CSV: {failure}")) from None
    if out is None or done != len(out):
        raise InvalidInput(Problem(str(file), "holds no row" if rows is None else f"should hold {rows} rows", done))
    return out


def _columns(file: Path) -> int:
    with igzip.open(file) as start:  # type: ignore[no-untyped-call]  # typed in part
        return int(start.readline(_LONGEST).count(b",")) + 1


def _blocks(file: Path, columns: int, dtype: type[np.generic]) -> Iterator[NDArray[Any]]:
    """Yield the rows, some thousands [n, columns] at a time."""
    names = [str(column) for column in range(columns)]
    kind = pa.from_numpy_dtype(dtype)
    with (
        # half the time of pyarrow's own decompression
        igzip_threaded.open(file) as stream,  # type: ignore[no-untyped-call]  # typed in part
        csv.open_csv(
            stream,
            read_options=csv.ReadOptions(column_names=names, block_size=_BLOCK),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, kind)),
        ) as reader,
    ):
        for batch in reader:
            yield batch.to_tensor(null_to_nan=np.issubdtype(dtype, np.floating)).to_numpy()


def _read_plain(file: Path, out: NDArray[Any], progress: Progress) -> bool:
    """Fill `out`; False where the file holds anything but as many rows of plain numbers.

    Three times as quick as pyarrow on one core, and its blocks are parsed side by side.
    """
    whole = out.dtype.kind in "iu"
    limit = min(_EXACT, np.iinfo(out.dtype).max) if whole else _EXACT
    workers = max(1, int(usable_cores()))
    waiting: deque[Future[bool]] = deque()
    first = 0
    with ThreadPoolExecutor(workers) as pool:
        for text in _lines(file):
            rows = text.count(b"\n")
            if first + rows > len(out):
                return False
            part = out[first : first + rows]
            waiting.append(pool.submit(_parse, np.frombuffer(text, np.uint8), part, limit, whole, _POWERS))
            first += rows
            if len(waiting) > 2 * workers and not waiting.popleft().result():
                return False
            progress(f"read {file.name}", first, len(out))
        return all(done.result() for done in waiting) and first == len(out)


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the text of a gzipped file in blocks of whole lines."""
    rest = b""
    with igzip_threaded.open(file) as stream:  # type: ignore[no-untyped-call]  # typed in part
        while data := stream.read(_BLOCK):
            end = data.rfind(b"\n") + 1
            if end:
                yield rest + data[:end]
                rest = data[end:]
            else:
                rest += data
                if len(rest) > _LONGEST:
                    raise ValueError(f"a line of more than {_LONGEST} bytes")
    if rest:
        yield rest + b"\n"


@inlined
def _digits(text: Any, at: Any, value: Any) -> Any:
    """Return the place after the digits at `at`, and 10^digits times the value plus what they say."""
    digit = _byte(text[at] - _ZERO)  # of any other character more than 9
    while digit < 10:
        value = 10 * value + _whole(digit)
        at += _ONE
        digit = _byte(text[at] - _ZERO)
    return at, value


@compiled
def _parse(text: Any, out: Any, limit: Any, whole: Any, powers: Any) -> Any:
    """Parse lines of numbers like -12.5e-3 to out [rows, columns], text holding as many newlines as out has rows.

    Returns False, out half filled, at anything else: other characters, another number of columns, too many digits.
    """
    at = _place(0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            negative = text[at] == _MINUS
            if negative:
                at += _ONE
            start = at
            at, value = _digits(text, at, _whole(0))
            count, scale = _whole(at - start), _whole(0)
            if text[at] == _POINT and not whole:
                start = at + _ONE
                at, value = _digits(text, start, value)
                scale = _whole(at - start)
                count += scale
            if count == 0 or count > _DIGITS or value > limit:
                return False
            if text[at] | _CASE == _EXPONENT and not whole:
                down = text[at + _ONE] == _MINUS
                start = at + _ONE + _ONE if down or text[at + _ONE] == _PLUS else at + _ONE
                at, power = _digits(text, start, _whole(0))
                if at == start or at > start + _place(3):
                    return False
                scale += power if down else -power
            if text[at] != (_NEWLINE if j == out.shape[1] - 1 else _COMMA) or abs(scale) >= powers.shape[0]:
                return False
            at += _ONE
            if whole:
                out[i, j] = -value if negative else value
            else:
                number = value / powers[scale] if scale >= 0 else value * powers[-scale]
                out[i, j] = -number if negative else number
    return True
