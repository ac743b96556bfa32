"""Aggregation kernels against torch's own ops and a dense matrix, forward and backward."""

from __future__ import annotations

import threading

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.aggregate import Hop, aggregate, aggregate_torch
from horovod_trainer.counters import derive_key
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Aggregator, aggregate_range
from horovod_trainer.data.sampler import Block, sample_blocks
from horovod_trainer.jit import set_threads
from tests.graphs import AGGREGATORS, World, random_pairs

aggregators = st.sampled_from(AGGREGATORS)


def random_block(seed: int, num_dst: int, extra: int, most: int) -> Block:
    """Return a block in which every destination receives from up to `most` distinct sources, some from none."""
    rng = np.random.default_rng(seed)
    num_src = num_dst + extra
    rows = [rng.permutation(num_src)[: rng.integers(0, most + 1)] for _ in range(num_dst)]
    drawn = np.array([len(row) for row in rows], np.int64)
    indptr = np.concatenate([[0], np.cumsum(drawn)]).astype(np.int64)
    cols = np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int32)
    return Block(num_dst, num_src, indptr, cols, drawn + rng.integers(0, 5, num_dst) * (drawn > 0))


def dense(block: Block) -> torch.Tensor:
    """Return the block as a 0/1 matrix [num_dst, num_src]."""
    matrix = torch.zeros(block.num_dst, block.num_src)
    for d in range(block.num_dst):
        matrix[d, block.cols[block.indptr[d] : block.indptr[d + 1]].astype(np.int64)] = 1.0
    return matrix


blocks = st.builds(
    random_block,
    seed=st.integers(0, 2**32 - 1),
    num_dst=st.integers(0, 8),
    extra=st.integers(0, 8),
    most=st.integers(0, 9),
)


@settings(max_examples=60, deadline=None)
@given(block=blocks, aggregator=aggregators, width=st.integers(1, 5), seed=st.integers(0, 2**31 - 1))
def test_kernels_equal_torch_forward_and_backward(block: Block, aggregator: Aggregator, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(block.num_src, width, generator=generator)
    weight = torch.randn(block.num_dst, width, generator=generator)
    hop = Hop.of(block, aggregator)
    results = []
    for function in (aggregate, aggregate_torch):
        h = values.clone().requires_grad_()
        out = function(h, hop, aggregator)
        assert out.shape == (block.num_dst, width)
        torch.autograd.backward((out * weight).sum())
        assert h.grad is not None
        results.append((out.detach(), h.grad))
    torch.testing.assert_close(results[0], results[1])
    without = torch.from_numpy(np.diff(block.indptr) == 0)
    assert not results[0][0][without].any(), "0 where there is nothing to aggregate"


@settings(max_examples=40, deadline=None)
@given(block=blocks, seed=st.integers(0, 2**31 - 1))
def test_sum_and_mean_are_the_matrix_they_stand_for(block: Block, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(block.num_src, 3, generator=generator, requires_grad=True)
    weight = torch.randn(block.num_dst, 3, generator=generator)
    matrix = dense(block)
    drawn = matrix.sum(1, keepdim=True)
    tops: dict[Aggregator, torch.Tensor] = {
        "mean": torch.ones_like(drawn),
        "sum": torch.from_numpy(block.remaining)[:, None].float(),
    }
    for aggregator, top in tops.items():
        scaled = torch.where(drawn > 0, top / drawn, torch.zeros_like(drawn)) * matrix
        out = aggregate(h, Hop.of(block, aggregator), aggregator)
        torch.testing.assert_close(out.detach(), scaled @ h.detach())
        (grad,) = torch.autograd.grad((out * weight).sum(), h)
        torch.testing.assert_close(grad, scaled.T @ weight)


@settings(max_examples=40, deadline=None)
@given(block=blocks, seed=st.integers(0, 2**31 - 1))
def test_ties_of_the_maximum_pass_the_whole_gradient_on_once(block: Block, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (block.num_src, 4), generator=generator).float()
    weight = torch.randn(block.num_dst, 4, generator=generator)
    hop = Hop.of(block, "max")
    h = values.clone().requires_grad_()
    out = aggregate(h, hop, "max")
    torch.testing.assert_close(out.detach(), aggregate_torch(values, hop, "max"))
    (grad,) = torch.autograd.grad((out * weight).sum(), h)
    want = torch.zeros_like(values)
    for d in range(block.num_dst):
        cols = block.cols[block.indptr[d] : block.indptr[d + 1]].astype(np.int64)
        for f in range(4 if len(cols) else 0):
            want[cols[int(values[cols, f].argmax())], f] += weight[d, f]
    torch.testing.assert_close(grad, want)


def test_any_memory_layout_is_read_right() -> None:
    block = random_block(0, 6, 3, 4)
    for aggregator in AGGREGATORS:
        hop = Hop.of(block, aggregator)
        wide = torch.randn(5, block.num_src, generator=torch.Generator().manual_seed(1))
        slanted = wide.T.detach().requires_grad_()
        straight = wide.T.contiguous().requires_grad_()
        for h in (slanted, straight):
            torch.autograd.backward(aggregate(h, hop, aggregator).sum())  # the gradient of a sum arrives expanded
        assert slanted.grad is not None
        assert straight.grad is not None
        torch.testing.assert_close(slanted.grad, straight.grad, rtol=0, atol=0)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_all_neighbours_equal_the_full_graph(aggregator: Aggregator) -> None:
    world = World(50, random_pairs(2, 48, 150))  # two isolated nodes
    graph = world.graph()
    h = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    seeds = np.random.default_rng(1).permutation(50)[:20].astype(np.int32)
    nodes, (block,) = sample_blocks(graph, seeds, no_exclusion(), (-1,), 5)
    got = aggregate(torch.from_numpy(h[nodes]), Hop.of(block, aggregator), aggregator)
    np.testing.assert_allclose(got.numpy(), aggregate_range(graph, h, 0, 50, aggregator)[seeds], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregator", ["sum", "mean"])
def test_sampled_aggregates_agree_with_the_full_graph_on_average(aggregator: Aggregator) -> None:
    """Degrees 1 to 12, fan-out 3: the mean over many keys is the full neighbourhood's sum (or mean)."""
    world = World(13, [(hub, leaf) for hub in range(12) for leaf in range(hub + 1, 13)])
    graph = world.graph()
    h = np.random.default_rng(3).normal(size=(13, 2)).astype(np.float32)
    seeds = np.arange(13, dtype=np.int32)
    rounds = 600
    total = np.zeros((13, 2))
    square = np.zeros((13, 2))
    for number in range(rounds):
        nodes, (block,) = sample_blocks(graph, seeds, no_exclusion(), (3,), derive_key(8, number))
        got = aggregate(torch.from_numpy(h[nodes]), Hop.of(block, aggregator), aggregator).numpy()
        total += got
        square += got.astype(np.float64) ** 2
    mean = total / rounds
    error = np.sqrt(np.maximum(square / rounds - mean**2, 0) / rounds)
    assert (np.abs(mean - aggregate_range(graph, h, 0, 13, aggregator)) < 4.5 * error + 1e-4).all()


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_threads_do_not_change_a_bit(aggregator: Aggregator) -> None:
    """One, many, and several at once: the threading layer would abort the process on two parallel kernels."""
    block = random_block(4, 400, 100, 12)
    hop = Hop.of(block, aggregator)
    values = torch.randn(block.num_src, 16, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(block.num_dst, 16, generator=torch.Generator().manual_seed(3))

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        h = values.clone().requires_grad_()
        out = aggregate(h, hop, aggregator)
        (grad,) = torch.autograd.grad((out * weight).sum(), h)
        return out.detach(), grad

    before = numba.get_num_threads()
    try:
        results = []
        for threads in (1, 10_000):  # never more than numba started with
            set_threads(threads)
            results.append(compute())
    finally:
        set_threads(before)
    workers = [threading.Thread(target=lambda: results.append(compute())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 6
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])
