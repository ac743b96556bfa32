"""Counter-based random numbers: every draw is a pure function of a key and a counter, so no RNG state exists to be saved.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); the
epoch's order is a Feistel network with cycle walking (Black, Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.jit import compiled, inlined

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB

# numba keeps unsigned arithmetic only when every operand is np.uint64
GOLDEN = np.uint64(_GOLDEN)
M1 = np.uint64(_M1)
M2 = np.uint64(_M2)
S11, S27, S30, S31, S32 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)
TWO32 = 4294967296.0
ROUNDS = 6  # a Feistel network is a strong pseudorandom permutation from 4 rounds on; 6 costs nothing here


class Stream(IntEnum):
    """What a key is used for: streams of one micro-batch never share draws."""

    ORDER = 1
    NEGATIVES = 2
    SAMPLING = 3
    DROPOUT = 4
    VALIDATION_SUBSET = 5


def mix(x: int) -> int:
    """Return the SplitMix64 finaliser of a 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * _M1) & MASK
    x = ((x ^ (x >> 27)) * _M2) & MASK
    return x ^ (x >> 31)


def derive_key(*parts: int) -> int:
    """Return the 64-bit key of a path of integers, such as (seed, epoch, step, micro-batch, stream)."""
    key = _GOLDEN
    for part in parts:
        key = mix(key ^ mix((part + _GOLDEN) & MASK))
    return key


@inlined
def mix64(x: Any) -> Any:
    """`mix` for np.uint64 inside compiled code."""
    x = (x ^ (x >> S30)) * M1
    x = (x ^ (x >> S27)) * M2
    return x ^ (x >> S31)


@inlined
def fold64(key: Any, part: Any) -> Any:
    """Return the key of `part` (a non-negative integer) below `key`, both np.uint64 inside compiled code."""
    return mix64(key ^ mix64(np.uint64(part) + GOLDEN))


@inlined
def below64(key: Any, counter: Any, n: Any) -> Any:
    """Return draw number `counter` of `key`, uniform on [0, n); its bias is below n * 2**-53."""
    bits = mix64(key + (np.uint64(counter) + np.uint64(1)) * GOLDEN)
    return np.int64(np.float64(bits >> S11) * 1.1102230246251565e-16 * np.float64(n))  # 2**-53


@compiled
def permute(key: Any, n: Any, first: Any, count: Any) -> Any:
    """Return the images of first .. first+count-1 under the keyed bijection of [0, n): int64 [count], constant memory."""
    half = 1
    while (np.int64(1) << np.int64(2 * half)) < n:
        half += 1
    shift = np.uint64(half)
    low = (np.uint64(1) << shift) - np.uint64(1)
    out = np.empty(count, np.int64)
    for i in range(count):
        x = np.uint64(first + i)
        while True:
            left, right = x >> shift, x & low
            for r in range(ROUNDS):
                left, right = right, left ^ (mix64(key ^ mix64(right + np.uint64(r + 1) * GOLDEN)) & low)
            x = (left << shift) | right
            if x < np.uint64(n):  # cycle walking: at most 4 tries on average
                break
        out[i] = np.int64(x)
    return out


@compiled
def integers(key: Any, limits: Any, per_row: Any) -> Any:
    """Return int64 [rows, per_row] draws, row i uniform on [0, limits[i])."""
    rows = limits.shape[0]
    out = np.empty((rows, per_row), np.int64)
    for i in range(rows):
        row_key = fold64(key, i)
        for j in range(per_row):
            out[i, j] = below64(row_key, j, limits[i])
    return out


@inlined
def kept32(key: Any, threshold: Any, i: Any) -> Any:
    """Return whether dropout keeps entry i, all np.uint64: one mix gives the 32-bit draws of entries 2j and 2j + 1."""
    bits = mix64(key + ((i & ~np.uint64(1)) + np.uint64(1)) * GOLDEN)
    return ((bits >> (S32 * (i & np.uint64(1)))) & LOW) >= threshold


@compiled
def keep_scaled(key: Any, p: Any, out: Any) -> None:
    """Fill the float32 vector `out` with 0 (probability p) or 1 / (1 - p)."""
    threshold = np.uint64(p * TWO32)
    scale = np.float32(1.0 / (1.0 - p))
    for i in range(out.shape[0]):
        out[i] = scale if kept32(key, threshold, np.uint64(i)) else np.float32(0)


def dropout_mask(key: int, p: float, size: int) -> NDArray[np.float32]:
    """Return the mask of inverted dropout: float32 [size], 0 with probability p, else 1 / (1 - p)."""
    out = np.empty(size, np.float32)
    keep_scaled(np.uint64(key), p, out)
    return out


def permutation(key: int, n: int, first: int, count: int) -> NDArray[np.int64]:
    """Return `count` entries from position `first` of the key's order of [0, n): int64 [count], each value once per n."""
    result: NDArray[np.int64] = permute(np.uint64(key), n, first, count)
    return result


def draw_below(key: int, limits: NDArray[np.int64], per_row: int) -> NDArray[np.int64]:
    """Return int64 [len(limits), per_row] uniform draws, row i on [0, limits[i])."""
    result: NDArray[np.int64] = integers(np.uint64(key), limits, per_row)
    return result
