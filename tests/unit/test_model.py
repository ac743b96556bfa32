"""The encoder and decoders: parity with PyG, parameter counts, dropout, a graph solved by hand, the empty share."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from horovod_trainer.aggregate import Hop, aggregate
from horovod_trainer.config import LossSection, ModelSection
from horovod_trainer.counters import derive_key
from horovod_trainer.data.exclusion import no_exclusion
from horovod_trainer.data.gather import Aggregator
from horovod_trainer.data.sampler import Graph, sample_blocks
from horovod_trainer.forward import forward
from horovod_trainer.loss import link_loss
from horovod_trainer.model import DotDecoder, Dropout, Encoder, LinkPredictor, MlpDecoder, SageLayer
from tests.graphs import AGGREGATORS, FOUR, FOUR_INPUT, FOUR_MAX, FOUR_MEAN, FOUR_SUM, World, graph_of, random_pairs

OFF = Dropout(0, active=False)


def hops_of(graph: Graph, aggregator: Aggregator, layers: int) -> list[Hop]:
    """Return hops that take every neighbour of every node, nodes in their own order."""
    everyone = np.arange(graph.num_nodes, dtype=np.int32)
    _, blocks = sample_blocks(graph, everyone, no_exclusion(), (-1,) * layers, 0)
    return [Hop.of(block, aggregator) for block in blocks]


def test_the_seed_architecture_has_526080_parameters() -> None:
    config = ModelSection(layers=5, aggregator="sum", normalise=True, decoder="dot", input="constant")
    assert LinkPredictor(config, 1, 0).num_parameters == 526_080


def test_ogbs_architecture_has_460289_parameters() -> None:
    config = ModelSection(layers=3, hidden=256, out=256, decoder="mlp", decoder_layers=3, decoder_hidden=256)
    assert LinkPredictor(config, 128, 0).num_parameters == 460_289


@pytest.mark.parametrize(("aggregator", "want"), [("mean", FOUR_MEAN), ("sum", FOUR_SUM), ("max", FOUR_MAX)])
def test_four_nodes_by_hand(aggregator: Aggregator, want: list[float]) -> None:
    graph = graph_of(4, FOUR)
    (hop,) = hops_of(graph, aggregator, 1)
    neighbourhood = aggregate(torch.from_numpy(FOUR_INPUT), hop, aggregator)
    torch.testing.assert_close(neighbourhood.ravel(), torch.tensor(want))
    layer = SageLayer(1, 1, normalise=False)
    with torch.no_grad():
        layer.neighbour.weight.fill_(2.0)
        layer.neighbour.bias.fill_(-1.0)
        layer.own.weight.fill_(10.0)
    out = layer(torch.from_numpy(FOUR_INPUT), neighbourhood).ravel()
    torch.testing.assert_close(out, 2.0 * torch.tensor(want) - 1.0 + 10.0 * torch.from_numpy(FOUR_INPUT).ravel())


def test_two_layers_by_hand() -> None:
    """All weights 1, no bias, sum; node 3 hears of 1 and 2 through 0 only."""
    encoder = Encoder(ModelSection(layers=2, hidden=1, out=1, aggregator="sum"), 1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    graph = graph_of(4, FOUR)
    got = encoder(torch.from_numpy(FOUR_INPUT), False, hops_of(graph, "sum", 2), OFF).ravel()
    # layer 1: own + sum = 15, 7, 7, 9; layer 2: 15 + 23, 7 + 22, 7 + 22, 9 + 15
    assert got.tolist() == [38.0, 29.0, 29.0, 24.0]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_parity_with_pyg(aggregator: Aggregator, normalise: bool) -> None:
    """Two SAGEConv layers with ReLU between them: outputs and gradients of inputs and every weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG's import warns about its optional wheels
        from torch_geometric.nn import SAGEConv

    graph = graph_of(40, random_pairs(1, 38, 120))  # two isolated nodes
    config = ModelSection(layers=2, hidden=6, out=5, aggregator=aggregator, normalise=normalise)
    encoder = LinkPredictor(config, 3, 7).encoder
    theirs = torch.nn.ModuleList([SAGEConv(3, 6, aggr=aggregator, normalize=normalise),
                                  SAGEConv(6, 5, aggr=aggregator, normalize=normalise)])  # fmt: skip
    for ours, other in zip(encoder.layers, theirs, strict=True):
        state = {name.replace("neighbour", "lin_l").replace("own", "lin_r"): w for name, w in ours.state_dict().items()}
        other.load_state_dict(state)

    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    destination = torch.from_numpy(np.repeat(np.arange(40), np.diff(graph.indptr)))
    edge_index = torch.stack([torch.from_numpy(graph.indices.astype(np.int64)), destination])

    x = values.clone().requires_grad_()
    out = encoder(x, False, hops_of(graph, aggregator, 2), OFF)
    torch.autograd.backward((out * weight).sum())
    y = values.clone().requires_grad_()
    want = theirs[1](functional.relu(theirs[0](y, edge_index)), edge_index)
    torch.autograd.backward((want * weight).sum())

    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert len(grads) == 6
    for name, parameter in encoder.layers.named_parameters():
        other_name = name.replace("neighbour", "lin_l").replace("own", "lin_r")
        torch.testing.assert_close(parameter.grad, grads[other_name], rtol=1e-4, atol=1e-5)


def test_normalised_rows_have_length_one() -> None:
    layer = SageLayer(3, 4, normalise=True)
    out = layer(torch.randn(6, 3), torch.randn(6, 3))
    torch.testing.assert_close(out.norm(dim=1), torch.ones(6))


def test_initial_weights_come_from_the_seed_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = LinkPredictor(ModelSection(hidden=4, out=4), 3, 5)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, other = (
        LinkPredictor(ModelSection(hidden=4, out=4), 3, 5),
        LinkPredictor(ModelSection(hidden=4, out=4), 3, 6),
    )
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_dropout_is_a_function_of_key_and_place() -> None:
    x = torch.ones(50, 20)

    def masks(key: int) -> list[torch.Tensor]:
        drop = Dropout(key, active=True)
        return [drop(x, 0.5), drop(x, 0.5), drop(x, 0.5)]

    first = masks(3)
    torch.manual_seed(99)
    for a, b in zip(first, masks(3), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first[0], masks(4)[0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_right_share_and_keeps_the_mean(p: float) -> None:
    x = torch.full((500, 400), 3.0)
    out = Dropout(derive_key(12), active=True)(x, p)
    kept = out != 0
    assert abs(float(kept.float().mean()) - (1 - p)) < 0.005  # 4.5 standard deviations at most
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3.0 / (1 - p)))
    assert (kept.float().mean(0) - (1 - p)).abs().max() < 0.11, "no column is special"
    assert (kept.float().mean(1) - (1 - p)).abs().max() < 0.12, "no row is special"


def test_dropout_masks_the_gradient_alike() -> None:
    x = torch.ones(10, 10, requires_grad=True)
    out = Dropout(1, active=True)(x, 0.5)
    torch.autograd.backward(out.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_dropout_off_changes_nothing() -> None:
    x = torch.randn(3, 3)
    assert Dropout(1, active=False)(x, 0.5) is x
    assert Dropout(1, active=True)(x, 0.0) is x


@pytest.mark.parametrize("decoder", [DotDecoder(), MlpDecoder(ModelSection(decoder="mlp", out=4, decoder_hidden=5))])
def test_pooled_scores_equal_one_by_one(decoder: Any) -> None:
    a, pool = torch.randn(3, 4), torch.randn(6, 4)
    want = torch.stack([decoder(row.expand(6, 4), pool, OFF) for row in a])
    torch.testing.assert_close(decoder.pooled(a, pool, OFF), want)
    torch.testing.assert_close(decoder(a[:, None, :], pool.expand(3, 6, 4), OFF), want)


def test_decoders_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[3.0, 4.0], [2.0, 2.0]])
    assert DotDecoder()(a, b, OFF).tolist() == [11.0, -1.0]
    mlp = MlpDecoder(ModelSection(decoder="mlp", out=2, decoder_hidden=2, decoder_layers=2))
    weights = {
        "layers.0.weight": [[1.0, 1.0], [-1.0, 0.0]],
        "layers.0.bias": [0.0, 0.0],
        "layers.1.weight": [[2.0, 3.0]],
    }
    mlp.load_state_dict({name: torch.tensor(value) for name, value in (weights | {"layers.1.bias": [0.5]}).items()})
    # Hadamard products (3, 8) and (1, -2); hidden relu (11, 0) and (0, 0)
    assert mlp(a, b, OFF).tolist() == [22.5, 0.5]


def test_dropout_sits_before_every_layer_but_the_first_and_on_the_input_when_asked() -> None:
    graph = graph_of(4, FOUR)
    x = torch.from_numpy(FOUR_INPUT)
    hops = hops_of(graph, "mean", 3)
    for dropout, input_dropout, places in ((0.0, 0.0, 0), (0.5, 0.0, 2), (0.0, 0.5, 1), (0.5, 0.5, 3)):
        config = ModelSection(layers=3, hidden=4, out=4, dropout=dropout, input_dropout=input_dropout)
        drop = Dropout(5, active=True)
        Encoder(config, 1)(x, None, hops, drop)
        assert drop.place == places


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("kind", ["bce", "margin", "softmax"])
def test_an_empty_share_runs_a_backward_of_zeros_through_every_parameter(
    decoder: Any, shared: bool, stored: bool, aggregator: Aggregator, kind: Any
) -> None:
    recipe = World(6, [(0, 1), (2, 3)]).recipe(
        batch_size=2, micro_batches=3, fanouts=(2, 2), shared=shared, stored=aggregator if stored else None
    )
    batch = recipe.build(0, 0, 1)
    assert len(batch.source) == 0
    config = ModelSection(
        hidden=4, out=4, aggregator=aggregator, decoder=decoder, decoder_hidden=4, dropout=0.5, normalise=True
    )
    model = LinkPredictor(config, 3, 0)
    pos, neg, mask = forward(model, batch, recipe, torch.device("cpu"))
    assert (pos.shape, neg.shape, mask.shape) == ((0,), (0, 2), (0, 2))
    loss = link_loss(LossSection(kind=kind), pos, neg, mask)
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
@pytest.mark.parametrize("shared", [False, True])
def test_forward_scores_the_pairs_it_names(decoder: Any, shared: bool) -> None:
    """pos and neg of a micro-batch are the decoder's scores of the embeddings of its own endpoints and tails."""
    recipe = World(12, random_pairs(2, 12, 20)).recipe(batch_size=6, fanouts=(3, 3), shared=shared, negatives=4)
    batch = recipe.build(0, 0, 0)
    model = LinkPredictor(ModelSection(hidden=4, out=4, decoder=decoder, decoder_hidden=4), 3, 0)
    pos, neg, mask = forward(model, batch, recipe, torch.device("cpu"))
    hops = [Hop.of(block, "mean") for block in batch.blocks]
    h = dict(zip(batch.nodes.tolist(), model.encoder(torch.from_numpy(batch.dense()), False, hops, OFF), strict=False))
    edges = recipe.schedule.edges(0, 0, 0)
    for i, (u, v) in enumerate(zip(recipe.edge_source[edges], recipe.edge_target[edges], strict=True)):
        torch.testing.assert_close(pos[i], model.decoder(h[int(u)], h[int(v)], OFF))
        tails = batch.negatives.tails if shared else batch.negatives.tails[i]
        for j, tail in enumerate(tails):
            torch.testing.assert_close(neg[i, j], model.decoder(h[int(u)], h[int(tail)], OFF))
    np.testing.assert_array_equal(mask.numpy(), batch.negatives.valid)
