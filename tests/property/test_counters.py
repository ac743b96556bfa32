"""Counter-based numbers: a bijection for every n, uniform draws, keys that depend on every part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.counters import GOLDEN, MASK, Stream, derive_key, draw_below, dropout_mask, mix, permutation

keys = st.integers(0, MASK)
CHI2_19_DF = 43.8  # the 0.999 quantile with 19 degrees of freedom; the keys below are fixed, so this never flickers


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("key", [0, 1, MASK])
def test_order_is_a_bijection_for_every_small_n(key: int) -> None:
    for n in range(1, 150):
        assert sorted(permutation(key, n, 0, n)) == list(range(n))


@settings(max_examples=40, deadline=None)
@given(key=keys, n=st.integers(1, 5000), data=st.data())
def test_order_can_be_read_in_any_windows(key: int, n: int, data: st.DataObject) -> None:
    whole = permutation(key, n, 0, n)
    assert len(set(whole.tolist())) == n
    assert whole.min() == 0
    assert whole.max() == n - 1
    first = data.draw(st.integers(0, n))
    count = data.draw(st.integers(0, n - first))
    np.testing.assert_array_equal(permutation(key, n, first, count), whole[first : first + count])


@settings(max_examples=20, deadline=None)
@given(key=keys, n=st.integers(2**31 - 100, 2**40), first=st.integers(0, 2**31 - 200))
def test_order_of_a_huge_range_needs_no_memory(key: int, n: int, first: int) -> None:
    some = permutation(key, n, first, 50)
    assert len(set(some.tolist())) == 50
    assert some.min() >= 0
    assert some.max() < n


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), n=st.integers(30, 300))
def test_order_changes_with_epoch_and_seed(seed: int, epoch: int, n: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for i in permutation(derive_key(seed, Stream.ORDER, epoch), n, 0, n)]

    here = order(seed, epoch)
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert here != list(range(n))


def test_every_edge_comes_first_equally_often() -> None:
    firsts = np.array([permutation(derive_key(5, key), 20, 0, 1)[0] for key in range(4000)])
    assert chi_square(np.bincount(firsts, minlength=20), 200.0) < CHI2_19_DF


@settings(max_examples=40, deadline=None)
@given(key=keys, limits=st.lists(st.integers(1, 2**40), max_size=6), per_row=st.integers(0, 5))
def test_compiled_draws_equal_python_integers(key: int, limits: list[int], per_row: int) -> None:
    """The kernels' wrapping 64-bit arithmetic against Python's integers, draw by draw."""
    golden = int(GOLDEN)
    got = draw_below(key, np.array(limits, np.int64), per_row)
    assert got.shape == (len(limits), per_row)
    for row, limit in enumerate(limits):
        row_key = mix(key ^ mix(row + golden))
        for column in range(per_row):
            bits = mix((row_key + (column + 1) * golden) & MASK)
            assert got[row, column] == int((bits >> 11) * 2.0**-53 * limit)


@settings(max_examples=100, deadline=None)
@given(limit=st.integers(1, 2**53))
def test_the_largest_draw_stays_below_the_limit(limit: int) -> None:
    assert int((MASK >> 11) * 2.0**-53 * float(limit)) < limit


def test_draws_are_uniform() -> None:
    draws = draw_below(derive_key(1, 2), np.full(100, 20, np.int64), 100)
    assert chi_square(np.bincount(draws.ravel(), minlength=20), 500.0) < CHI2_19_DF
    assert chi_square(np.bincount(draws[:, 3], minlength=20), 5.0) < CHI2_19_DF


@settings(max_examples=30, deadline=None)
@given(key=keys, p=st.floats(0.0, 0.99), size=st.integers(0, 41), data=st.data())
def test_a_dropout_mask_holds_two_values_and_its_beginnings(key: int, p: float, size: int, data: st.DataObject) -> None:
    mask = dropout_mask(key, p, size)
    assert mask.shape == (size,)
    assert set(mask.tolist()) <= {0.0, float(np.float32(1 / (1 - p)))}
    part = data.draw(st.integers(0, size))
    np.testing.assert_array_equal(dropout_mask(key, p, part), mask[:part])


def test_dropout_entries_that_share_a_mix_are_independent() -> None:
    for shift in (1, 2):
        kept = dropout_mask(derive_key(6), 0.3, 100_000) > 0
        first, second = kept[:-shift:2], kept[shift::2][: len(kept[:-shift:2])]
        for a in (False, True):
            for b in (False, True):
                expected = (0.7 if a else 0.3) * (0.7 if b else 0.3)
                assert abs(((first == a) & (second == b)).mean() - expected) < 0.01  # 4.5 standard deviations


def test_the_mixer_is_splitmix64() -> None:
    """Published outputs of SplitMix64 from seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(1234567 + (number + 1) * int(GOLDEN)) for number in range(3)] == published


def test_numbers_stay_what_they_were() -> None:
    """A checkpoint resumed by a later version must see the same order and draws."""
    assert derive_key(1, 2, 3) == 0xD56D0264932A233F
    assert permutation(derive_key(1, 2, 3), 12, 0, 12).tolist() == [11, 1, 9, 0, 10, 7, 2, 6, 8, 5, 4, 3]
    assert draw_below(derive_key(4), np.full(1, 1000, np.int64), 6).tolist() == [[255, 666, 29, 426, 644, 475]]


def test_a_key_depends_on_every_part_and_their_order() -> None:
    parts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**63 - 1, 3), (3, 2**63 - 1)]
    assert len({derive_key(*part) for part in parts}) == len(parts)
    micro = {
        derive_key(7, epoch, step, m, s) for epoch in range(4) for step in range(4) for m in range(4) for s in Stream
    }
    assert len(micro) == 4 * 4 * 4 * len(Stream)
    assert all(0 <= key <= MASK for key in micro)
