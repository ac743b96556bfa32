"""Numbers as gzipped text against Python's own reading."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.data.sources.tables import read_table
from horovod_trainer.errors import InvalidInput
from tests.raw import silent

number = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-1000, 1000, places=6).map(str),
    st.floats(-1e9, 1e9, width=32).map(lambda value: repr(float(np.float32(value)))),
    st.sampled_from(["0", "-0", "-0.0", "1e-05", "-2.5E+3", "00012", "9007199254740992", "1e22", "5e-22"]),
)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), columns=st.integers(1, 4), end=st.booleans())
def test_numbers_are_read_to_the_last_bit(data: st.DataObject, columns: int, end: bool) -> None:
    rows = data.draw(st.lists(st.lists(number, min_size=columns, max_size=columns), min_size=1, max_size=8))
    expected = np.array([[float(cell) for cell in row] for row in rows])
    text = "\n".join(",".join(row) for row in rows) + "\n" * end
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "t.csv.gz"
        file.write_bytes(gzip.compress(text.encode()))
        out = read_table(file, len(rows), np.float64, silent)
        assert np.array_equal(out, expected)
        assert np.array_equal(np.signbit(out), np.signbit(expected))
        with pytest.raises(InvalidInput, match=rf"should hold {len(rows) + 1} rows \(got {len(rows)}\)"):
            read_table(file, len(rows) + 1, np.float64, silent)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_whole_numbers(tmp_path: Path, dtype: type[np.integer[Any]]) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"1,-2\n2147483647,0\n"))
    assert read_table(file, 2, dtype, silent).tolist() == [[1, -2], [2147483647, 0]]
    for text in (
        b"1,2\n3,4.0\n",
        b"1,2\n3,1e2\n",
        b"1,2\n3\n",
        b"1,2\n3,4,5\n",
        b"1,2\n3,99999999999999999999\n",
        b"1,2\n,3\n",
    ):
        file.write_bytes(gzip.compress(text))
        with pytest.raises(InvalidInput, match=r"t\.csv\.gz"):
            read_table(file, 2, dtype, silent)


@pytest.mark.parametrize("text", [b"1,2\n3,x\n", b"1,2\n3\n", b"1,2\n3,4,5\n", b"1,2\n--3,4\n", b"1,2\n1.2.3,4\n"])
def test_what_is_no_number_is_named(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(text))
    with pytest.raises(InvalidInput, match="not a readable gzipped CSV"):
        read_table(file, 2, np.float32, silent)


def test_an_empty_cell_is_nan(tmp_path: Path) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"1,2\n,4\n"))
    assert np.isnan(read_table(file, 2, np.float32, silent)[1, 0])
