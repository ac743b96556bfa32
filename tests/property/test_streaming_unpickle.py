"""Long texts in pickles of protocol 2, decoded piece by piece, against Python's own codecs."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.data import unpickle
from horovod_trainer.errors import InvalidInput


def streamed(content: object, piece: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpickle, "_LONG", piece)
        return unpickle.load_pickle("it", io.BytesIO(pickle.dumps(content, 2)), large=True)


@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30), piece=st.integers(7, 40))
def test_arrays_are_what_was_pickled(numbers: list[int], piece: int) -> None:
    # pieces below 7 would take the word "latin1" in the pickle for an array
    array = np.array(numbers, np.int64)
    got = streamed({"x": array}, piece)
    assert isinstance(got, dict)
    assert np.array_equal(np.asarray(got.get("x", got.get(b"x"))), array)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(max_codepoint=400), min_size=3, max_size=30), piece=st.integers(1, 3))
def test_a_text_is_latin1_or_refused(text: str, piece: int) -> None:
    try:
        expected = text.encode("latin1")
    except UnicodeEncodeError:
        with pytest.raises(InvalidInput, match="not latin-1"):
            streamed(text, piece)
    else:
        assert streamed(text, piece) == expected


@pytest.mark.parametrize("coded", [b"abc\xc3", b"\xc3abc", b"\x80abc", b"ab\xff\xff", b"abc"])
def test_broken_text_is_refused(coded: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "_LONG", 2)
    length = len(coded) + (coded == b"abc")  # the last one ends too early
    stream = b"\x80\x02X" + length.to_bytes(4, "little") + coded + (b"." if length == len(coded) else b"")
    with pytest.raises(InvalidInput, match="it: refused"):
        unpickle.load_pickle("it", io.BytesIO(stream), large=True)
