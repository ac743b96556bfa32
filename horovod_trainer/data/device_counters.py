"""The numbers of `counters` in torch ops, on any device and equal to the last bit.

torch has no unsigned 64-bit arithmetic: int64 wraps around alike in + and *, and a logical shift is an arithmetic one whose
new bits are masked off. Only integers and single float64 products occur, which IEEE 754 makes the same everywhere.
It runs in the tests on torch's CPU device; it has not run on hardware yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_trainer.counters import GOLDEN, LOW, M1, M2, TWO32


def signed(bits: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit integer."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN, _M1, _M2 = (signed(int(constant)) for constant in (GOLDEN, M1, M2))


def shift_right(x: Tensor, count: int) -> Tensor:
    """Return the logical right shift of int64 by 1 <= count <= 63 bits."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def mix64(x: Tensor) -> Tensor:
    """Return `counters.mix` of int64."""
    x = (x ^ shift_right(x, 30)) * _M1
    x = (x ^ shift_right(x, 27)) * _M2
    return x ^ shift_right(x, 31)


def fold64(key: int, part: Tensor) -> Tensor:
    """Return the keys int64 of the parts (int64, not negative) below a 64-bit key."""
    return mix64(mix64(part + _GOLDEN) ^ signed(key))


def below64(key: Tensor, counter: Tensor, n: Tensor) -> Tensor:
    """Return draw number `counter` of `key`, uniform on [0, n), all int64 and broadcast against each other."""
    bits = mix64(key + (counter + 1) * _GOLDEN)
    return (shift_right(bits, 11).double() * 2.0**-53 * n.double()).long()


def draw_below(key: int, limits: Tensor, per_row: int) -> Tensor:
    """Return int64 [len(limits), per_row] uniform draws, row i on [0, limits[i])."""
    row = torch.arange(len(limits), device=limits.device)
    column = torch.arange(per_row, device=limits.device)
    return below64(fold64(key, row)[:, None], column, limits[:, None])


def dropout_mask(key: int, p: float, size: int, device: torch.device) -> Tensor:
    """Return the mask of inverted dropout: float32 [size], 0 with probability p, else 1 / (1 - p)."""
    threshold = int(p * TWO32)
    number = torch.arange(0, size, 2, device=device)  # one mix gives two 32-bit draws
    bits = mix64((number + 1) * _GOLDEN + signed(key))
    draws = torch.stack([bits & int(LOW), shift_right(bits, 32)], dim=1).flatten()[:size]
    return (draws >= threshold) * (1.0 / (1.0 - p))
