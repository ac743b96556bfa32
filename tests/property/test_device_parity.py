"""The device's micro-batches against the CPU's: the same nodes, blocks, negatives and masks, the same loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer import counters
from horovod_trainer.config import LossSection, ModelSection
from horovod_trainer.data import device_counters
from horovod_trainer.data.batches import MicroBatch, Recipe
from horovod_trainer.data.device_batches import DeviceBatch, DeviceRecipe
from horovod_trainer.data.device_sampler import relabel
from horovod_trainer.data.gather import Aggregator
from horovod_trainer.data.sampler import NodeTable
from horovod_trainer.device_forward import device_forward
from horovod_trainer.forward import forward
from horovod_trainer.loss import link_loss
from horovod_trainer.model import LinkPredictor
from tests.graphs import AGGREGATORS, World, random_pairs, worlds

CPU = torch.device("cpu")
keys = st.integers(0, 2**64 - 1)


def equal(got: torch.Tensor, want: Any) -> None:
    """Assert that a tensor holds the numbers of an array (or a number), whatever the integers' width."""
    np.testing.assert_array_equal(got.numpy(), want)


def assert_same_batch(got: DeviceBatch, want: MicroBatch, num_nodes: int) -> None:
    """Assert that a padded micro-batch is the other, and that what is more is padding."""
    n = len(want.nodes)
    equal(got.count, n)
    equal(got.nodes[:n], want.nodes)
    assert (got.nodes[n:] == num_nodes).all()
    for name in ("source", "target", "tails"):
        equal(getattr(got, name), getattr(want, name))
    equal(got.negatives.tails, want.negatives.tails)
    equal(got.negatives.valid, want.negatives.valid)
    masked = want.negatives.drawn - int(want.negatives.valid.sum())
    equal(got.sums(), [want.excluded_pairs, want.negatives.drawn, masked, want.negatives.citing])
    assert (got.micro, got.dropout_key, got.stored_first_hop) == (want.micro, want.dropout_key, want.stored_first_hop)
    assert got.negatives.shared == want.negatives.shared
    for padded, block in zip(got.blocks, want.blocks, strict=True):
        drawn = np.diff(block.indptr)
        equal(padded.valid.sum(1)[: block.num_dst], drawn)
        assert not padded.valid[block.num_dst :].any()
        equal(padded.neighbours[padded.valid], block.cols)  # row after row, each in the order drawn
        equal(padded.remaining[: block.num_dst], block.remaining)
        assert padded.num_dst <= padded.num_src
    np.testing.assert_allclose(got.inputs[:n].numpy(), want.dense(), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(got.inputs).all()


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw a recipe: all that changes what a micro-batch holds, over small worlds and one with hubs."""
    world = draw(
        st.one_of(worlds(), st.builds(lambda seed: World(40, random_pairs(seed, 40, 150)), st.integers(0, 99)))
    )
    not_later = draw(st.booleans()) and world.year is not None
    stored = None if not_later else draw(st.sampled_from([None, *AGGREGATORS]))
    return world.recipe(
        batch_size=draw(st.integers(1, 25)), micro_batches=2, stored=stored, not_later=not_later,
        fanouts=tuple(draw(st.lists(st.sampled_from([1, 2, 3, 60]), min_size=1, max_size=3))),
        shared=draw(st.booleans()), negatives=draw(st.integers(2, 9)), exclude=draw(st.booleans()),
        seed=draw(st.integers(0, 2**63 - 1)),
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(recipe=recipes(), epoch=st.integers(0, 3), half=st.booleans())
def test_every_micro_batch_is_the_cpus(recipe: Recipe, epoch: int, half: bool) -> None:
    if half:  # stored as float16, summed and read as float32
        values = recipe.features.values.astype(np.float16)
        recipe = replace(recipe, features=replace(recipe.features, values=values))
    resident = DeviceRecipe.resident(recipe, CPU)
    for step in range(min(2, recipe.schedule.steps_per_epoch)):
        for micro in range(3):  # the last is nobody's, and empty
            number = (epoch, step, micro)
            assert_same_batch(resident.build(*number), recipe.build(*number), recipe.graph.num_nodes)


@st.composite
def models(draw: st.DrawFn, recipe: Recipe) -> LinkPredictor:
    """Draw a model for a recipe, in training mode."""
    stored = recipe.stored_first_hop
    aggregator: Aggregator = draw(st.sampled_from(AGGREGATORS)) if stored is None else stored
    section = ModelSection(
        layers=len(recipe.fanouts), hidden=5, out=4, normalise=draw(st.booleans()),
        aggregator=aggregator,
        dropout=draw(st.sampled_from([0.0, 0.4])), decoder=draw(st.sampled_from(["dot", "mlp"])), decoder_layers=2,
        input_dropout=0.0 if stored else draw(st.sampled_from([0.0, 0.3])), decoder_hidden=6,
    )  # fmt: skip
    return LinkPredictor(section, recipe.features.width, draw(st.integers(0, 99)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), recipe=recipes(), kind=st.sampled_from(["bce", "margin", "softmax"]), micro=st.integers(0, 2))
def test_loss_and_gradients_are_the_cpus(data: st.DataObject, recipe: Recipe, kind: Any, micro: int) -> None:
    model = data.draw(models(recipe))
    results = []
    for outputs in (
        forward(model, recipe.build(0, 0, micro), recipe, CPU),
        device_forward(model, DeviceRecipe.resident(recipe, CPU).build(0, 0, micro)),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss = link_loss(LossSection(kind=kind), *outputs)
        torch.autograd.backward(loss)
        results.append([loss.detach(), *outputs, *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@settings(deadline=None)  # the first example compiles
@given(key=keys, parts=st.lists(st.integers(0, 2**40), min_size=1, max_size=5), n=st.integers(1, 2**45))
def test_draws_are_the_cpus(key: int, parts: list[int], n: int) -> None:
    folded = device_counters.fold64(key, torch.tensor(parts))
    draws = device_counters.below64(folded[:, None], torch.arange(4), torch.tensor(n))
    limits = torch.full((len(parts),), n)
    equal(device_counters.draw_below(key, limits, 6), counters.draw_below(key, limits.numpy(), 6))
    for part, got, row in zip(parts, folded.tolist(), draws.tolist(), strict=True):
        want = counters.mix(key ^ counters.mix(part + int(counters.GOLDEN)))
        assert got % 2**64 == want
        bits = [counters.mix(want + (i + 1) * int(counters.GOLDEN)) >> 11 for i in range(4)]
        assert row == [int(float(b) * 2.0**-53 * float(n)) for b in bits]


@settings(deadline=None)  # the first example compiles
@given(key=keys, p=st.sampled_from([0.1, 0.5, 0.9]), size=st.integers(0, 40))
def test_dropout_masks_are_the_cpus(key: int, p: float, size: int) -> None:
    equal(device_counters.dropout_mask(key, p, size, CPU), counters.dropout_mask(key, p, size))


@settings(deadline=None)  # the first example compiles
@given(ids=st.lists(st.integers(0, 9), max_size=30), spare=st.integers(0, 3))
def test_local_ids_are_the_cpus(ids: list[int], spare: int) -> None:
    """Ids of 9 are padding."""
    there = np.array([node for node in ids if node != 9], np.int32)
    table = NodeTable(np.zeros(0, np.int32))
    want = table.add(there)
    local, nodes, count = relabel(torch.tensor(ids, dtype=torch.int64), len(set(ids)) + spare, 9)
    equal(local[torch.tensor(ids, dtype=torch.int64) != 9], want)
    equal(count, table.count)
    equal(nodes[: table.count], table.nodes())
    assert (nodes[table.count :] == 9).all()
