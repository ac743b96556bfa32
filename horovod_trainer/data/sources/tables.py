"""Gzipped CSV files of numbers, by pyarrow in blocks: no more of the text than a block is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # ships no types
from isal import igzip, igzip_lib, igzip_threaded
from numpy.typing import NDArray
from pyarrow import csv

from horovod_trainer.data.sources import Progress
from horovod_trainer.errors import InvalidInput, NotFound, Problem

_BLOCK = 1 << 21  # bytes of text parsed at a time
_LONGEST = 1 << 24  # bytes of a first line
_UNREADABLE: tuple[Any, ...] = (pa.ArrowException, igzip_lib.IsalError, ValueError, EOFError, OSError)

Allocate = Callable[[tuple[int, int], type[np.generic]], NDArray[Any]]


def read_table(
    file: Path, rows: int | None, dtype: type[np.generic], progress: Progress, allocate: Allocate = np.empty
) -> NDArray[Any]:
    """Return a gzipped CSV of numbers as [rows, columns]; raises InvalidInput when it has not that many rows.

    rows None: as many as come in one block. An empty cell is NaN where the type has one.
    """
    out: NDArray[Any] | None = None
    done = 0
    try:
        columns = _columns(file)
        if rows is not None:
            out = allocate((rows, columns), dtype)
        for block in _blocks(file, columns, dtype):
            out = allocate(block.shape, dtype) if out is None else out
            if done + len(block) <= len(out):
                out[done : done + len(block)] = block
            done += len(block)
            progress(f"read {file.name}", min(done, len(out)), len(out))
    except FileNotFoundError:
        raise NotFound(Problem(str(file), "missing")) from None
    except _UNREADABLE as failure:
        raise InvalidInput(Problem(str(file), f"not a readable gzipped CSV: {failure}")) from None
    if out is None or done != len(out):
        raise InvalidInput(Problem(str(file), f"should hold {rows} rows", done))
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
