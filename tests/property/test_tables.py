"""Numbers as text, parsed by the kernel, against Python's own reading."""

from __future__ import annotations

import errno
import gzip
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.data.sources import tables
from horovod_trainer.errors import InvalidInput
from tests.raw import silent

number = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-1000, 1000, places=6).map(str),
    st.floats(-1e9, 1e9, width=32).map(lambda value: repr(float(np.float32(value)))),
    st.floats(-1e9, 1e9, width=32).map(lambda value: str(np.float32(value))),
    st.sampled_from(["0", "-0", "-0.0", "1e-05", "-2.5E+3", "1.", ".5", "00012", "9007199254740992", "1e22", "5e-22"]),
)
odd = st.sampled_from(
    ["", "nan", "x", "1e", "1e400", " 1", "+1", "--1", "1.2.3", "123456789012345678901", '"1"', "1\r"]
)


def text_of(rows: list[list[str]], end: bool) -> bytes:
    text = "\n".join(",".join(row) for row in rows)
    return (text + "\n" * end).encode()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), columns=st.integers(1, 4), end=st.booleans(), block=st.integers(1, 40))
def test_plain_numbers_are_read_to_the_last_bit(data: st.DataObject, columns: int, end: bool, block: int) -> None:
    rows = data.draw(st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=1, max_size=8))
    expected = np.array([[float(cell) for cell in row] for row in rows])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK", block)  # lines are cut anywhere
        file = Path(folder) / "t.csv.gz"
        file.write_bytes(gzip.compress(text_of(rows, end)))
        out = np.full(expected.shape, np.nan)
        if tables._read_plain(file, out, silent):  # else there are too many digits for it
            assert np.array_equal(out, expected)
            assert np.array_equal(np.signbit(out), np.signbit(expected))
        else:
            assert any(sum(map(str.isdigit, cell)) > 15 or "e" in cell for row in rows for cell in row)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), cell=odd)
def test_what_is_not_plain_is_left_to_the_library(data: st.DataObject, cell: str) -> None:
    rows = [["1", "2"], ["3", "4"], ["5", "6"]]
    rows[data.draw(st.integers(0, 2))][data.draw(st.integers(0, 1))] = cell
    text = np.frombuffer(text_of(rows, True), np.uint8)
    assert not tables._parse(text, np.empty((3, 2)), 2**53, False, tables._POWERS)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_whole_numbers(tmp_path: Path, dtype: type[np.integer[Any]]) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"1,-2\n2147483647,0\n"))
    out = np.empty((2, 2), dtype, order="F")
    assert tables._read_plain(file, out, silent)
    assert out.tolist() == [[1, -2], [2147483647, 0]]
    for rows in (1, 3):
        assert not tables._read_plain(file, np.empty((rows, 2), dtype), silent)
    for text in (b"1,2\n3,4.0\n", b"1,2\n3,1e2\n", b"1,2\n3\n", b"1,2\n3,4,5\n", b"1,2\n3,99999999999999999\n"):
        file.write_bytes(gzip.compress(text))
        assert not tables._read_plain(file, out, silent)


def test_a_line_without_an_end_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LONGEST", 1 << 12)
    monkeypatch.setattr(tables, "_BLOCK", 1 << 10)
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"0" * (1 << 16)))
    with pytest.raises(InvalidInput, match="a line of more than 4096 bytes"):
        tables.read_table(file, 2, np.float32, silent)


def test_a_full_disk_is_not_the_file_s_fault(tmp_path: Path) -> None:
    def full(shape: tuple[int, int], dtype: type[np.generic]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"1,2\n"))
    with pytest.raises(OSError, match="No space left"):
        tables.read_table(file, 1, np.float32, silent, full)
