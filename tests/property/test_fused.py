"""The fused layer against the same in plain torch operations: values and every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from horovod_trainer import fused
from horovod_trainer.aggregate import Hop, aggregate_torch
from horovod_trainer.counters import dropout_mask
from horovod_trainer.data import batches
from horovod_trainer.data.gather import Inputs
from horovod_trainer.fused import Entering, activate, hop_layer, roomy, stored_layer
from tests.graphs import World, random_pairs


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)  # the first example compiles
@given(
    rows=st.integers(1, 12), width=st.integers(1, 9), normalise=st.booleans(), relu=st.booleans(),
    p=st.sampled_from([0.0, 0.3, 0.9]), key=st.integers(0, 2**64 - 1), zero=st.booleans(),
)  # fmt: skip
def test_activation(rows: int, width: int, normalise: bool, relu: bool, p: float, key: int, zero: bool) -> None:
    p = p if relu else 0.0
    x = normal(rows, width, seed=rows)
    if zero:
        x[0] = 0.0  # a row without a length
    weight = normal(rows, width, seed=1)
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    out = activate(ours * 1.0, normalise=normalise, relu=relu, p=p, key=key)
    want = functional.normalize(plain, dim=-1) if normalise else plain
    want = functional.relu(want) if relu else want
    want = want * torch.from_numpy(dropout_mask(key, p, x.numel())).view_as(x) if p else want
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    for result, leaf in ((out, ours), (want, plain)):
        torch.autograd.backward((result * weight).sum())
        assert leaf.grad is not None
    some = slice(1, None) if zero and normalise else slice(None)  # at length 0 torch divides by its epsilon, as we do
    torch.testing.assert_close(ours.grad[some], plain.grad[some], rtol=1e-4, atol=1e-5)  # type: ignore[index]


def test_dropout_hides_no_nan() -> None:
    x = torch.tensor([[1.0, torch.nan, -1.0, 2.0]]).repeat(8, 1)
    out = activate(x.clone(), normalise=False, relu=True, p=0.5, key=3)
    assert out[:, 1].isnan().any()
    assert not out[:, [0, 2, 3]].isnan().any()


def test_dropout_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="follows a ReLU"):
        activate(torch.ones(2, 2), normalise=False, relu=False, p=0.5, key=1)


@st.composite
def hops(draw: st.DrawFn) -> Hop:
    num_dst = draw(st.integers(1, 6))
    num_src = num_dst + draw(st.integers(0, 6))
    lists = draw(st.lists(st.lists(st.integers(0, num_src - 1), max_size=4), min_size=num_dst, max_size=num_dst))
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    cols = np.array([entry for row in lists for entry in row], np.int32)
    scale = np.array([1.0 / len(row) if row else 0.0 for row in lists], np.float32)
    return Hop(num_dst, num_src, indptr, cols, scale)


@settings(deadline=None)  # the first example compiles
@given(
    hop=hops(), width=st.integers(1, 5), out=st.integers(1, 5), relu=st.booleans(), p=st.sampled_from([0.0, 0.4]),
    leaf=st.booleans(), with_bias=st.booleans(),
)  # fmt: skip
def test_hop_layer(hop: Hop, width: int, out: int, relu: bool, p: float, leaf: bool, with_bias: bool) -> None:
    parts = [
        normal(hop.num_src, width, seed=1),
        normal(out, width, seed=2),
        normal(out, seed=3),
        normal(out, width, seed=4),
    ]
    ours, plain = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    ours[0].requires_grad_(leaf)
    shifts = [normal(width, seed=6).requires_grad_() for _ in range(2)]
    weight = normal(hop.num_dst, out, seed=5)
    entering = Entering(p, 7, shifts[0] if with_bias else None) if relu else None
    got = hop_layer(ours[0] * 1.0, hop, ours[1], ours[2], ours[3], entering)
    h, neighbour, bias, own = plain
    if relu:
        h = h + shifts[1] if with_bias else h
        h = functional.relu(h) * torch.from_numpy(dropout_mask(7, p, h.numel())).view_as(h)
    want = functional.linear(aggregate_torch(h, hop, "mean"), neighbour, bias) + h[: hop.num_dst] @ own.t()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.autograd.backward((got * weight).sum())
    torch.autograd.backward((want * weight).sum())
    for a, b in list(zip(ours, plain, strict=True))[0 if leaf else 1 :]:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    if leaf and relu and with_bias:  # inputs that learn nothing have no layer before, and so no bias
        torch.testing.assert_close(shifts[0].grad, shifts[1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
def test_stored_layer(rows: int, leaf: bool) -> None:
    parts = [normal(rows, 6, seed=1), normal(4, 3, seed=2), normal(4, seed=3), normal(4, 3, seed=4)]
    ours, plain = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    ours[0].requires_grad_(leaf)
    got = stored_layer(*ours)
    both, neighbour, bias, own = plain
    want = both[:, :3] @ own.t() + functional.linear(both[:, 3:], neighbour, bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.autograd.backward((got**2).sum())
    torch.autograd.backward((want**2).sum())
    for a, b in list(zip(ours, plain, strict=True))[0 if leaf else 1 :]:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@given(rows=st.integers(0, 5000))
def test_a_block_is_aligned_and_large_enough(rows: int) -> None:
    block = roomy(rows, 4)
    assert block.shape == (rows, 4)
    assert block.is_contiguous()
    assert block.data_ptr() % 64 == 0
    assert block.untyped_storage().nbytes() >= rows * 16


def test_sizes_are_few() -> None:
    """Micro-batches differ by a per cent or so; their memory is the same."""
    places = set()
    for rows in range(400_000, 406_000, 1500):
        block = roomy(rows, 64)
        places.add(block.data_ptr())
        del block
    assert len(places) == 1


@pytest.mark.parametrize("part", [1, 7, 10_000])
def test_inputs_gathered_part_by_part_give_the_same_layer(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PART", part)
    monkeypatch.setattr(batches, "LARGE", 0)
    recipe = World(60, random_pairs(1, 60, 300)).recipe(batch_size=20, fanouts=(3, 2), stored="mean")
    batch = recipe.build(0, 0, 0)
    assert isinstance(batch.inputs, Inputs)
    parts = [normal(4, 3, seed=2), normal(4, seed=3), normal(4, 3, seed=4)]
    ours, plain = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    got, want = stored_layer(batch.inputs, *ours), stored_layer(torch.from_numpy(batch.dense()), *plain)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.autograd.backward((got**2).sum())
    torch.autograd.backward((want**2).sum())
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
