"""GraphSAGE encoder (Hamilton et al. 2017; the layer of PyG's SAGEConv) and link decoders."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from horovod_trainer.aggregate import Hop, aggregate
from horovod_trainer.config import ModelSection
from horovod_trainer.counters import derive_key, dropout_mask
from horovod_trainer.data.gather import Aggregator, Inputs
from horovod_trainer.fused import Entering, activate, hop_layer, stored_layer


class SageLayer(nn.Module):
    """neighbour(aggregate) + self(own), then optionally L2-normalised: SAGEConv with root weight and one bias."""

    def __init__(self, width_in: int, width_out: int, normalise: bool) -> None:
        super().__init__()
        self.neighbour = nn.Linear(width_in, width_out)
        self.own = nn.Linear(width_in, width_out, bias=False)
        self.normalise = normalise

    def combine(self, own: torch.Tensor, aggregated: torch.Tensor) -> torch.Tensor:
        """Return [n, width_out], not yet normalised, from own rows and aggregated neighbourhoods, both [n, width_in]."""
        out: torch.Tensor = self.neighbour(aggregated).addmm_(own, self.own.weight.t())  # no third buffer for the sum
        return out

    def forward(self, own: torch.Tensor, aggregated: torch.Tensor) -> torch.Tensor:
        """Return [n, width_out] from the nodes' own rows and their aggregated neighbourhoods, both [n, width_in]."""
        out = self.combine(own, aggregated)
        return functional.normalize(out, dim=-1) if self.normalise else out

    def side_by_side(self, both: torch.Tensor | Inputs, with_bias: bool) -> torch.Tensor:
        """Return `combine` of own rows and aggregated neighbourhoods that lie side by side, [n, 2 width_in]: one GEMM."""
        bias = self.neighbour.bias if with_bias else None
        if isinstance(both, Inputs) or both.device.type == "cpu":
            return stored_layer(both, self.neighbour.weight, bias, self.own.weight)
        weight = torch.cat([self.own.weight, self.neighbour.weight], dim=1)
        return functional.linear(both, weight, bias)

    def sampled(
        self, h: torch.Tensor, hop: Hop, aggregator: Aggregator, entering: Entering | None = None
    ) -> torch.Tensor:
        """Return [num_dst, width_out], not yet normalised, of a sampled hop over h [num_src, width_in]."""
        if _fusible(h, aggregator):
            return hop_layer(h, hop, self.neighbour.weight, self.neighbour.bias, self.own.weight, entering)
        return self.combine(h[: hop.num_dst], aggregate(h, hop, aggregator))


def _fusible(h: torch.Tensor | Inputs, aggregator: Aggregator) -> bool:
    """Return whether a hop over h runs in the fused kernels."""
    if isinstance(h, Inputs):
        return aggregator != "max"
    return h.device.type == "cpu" and aggregator != "max"


class Dropout:
    """Dropout whose masks are a pure function of the micro-batch's key and the place in the network."""

    def __init__(self, key: int, active: bool) -> None:
        self.key, self.active, self.place = key, active, 0

    def __call__(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """Return x with entries zeroed with probability p and the others scaled by 1 / (1 - p)."""
        if p == 0.0 or not self.active:
            return x
        key = self.next_key()
        if x.device.type == "cpu":  # 12 times faster than torch's bernoulli_ with a generator
            return x * torch.from_numpy(dropout_mask(key, p, x.numel())).view_as(x)
        generator = torch.Generator(x.device).manual_seed(key >> 1)
        return x * torch.empty_like(x).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)

    def next_key(self) -> int:
        """Return the key of the next place."""
        key = derive_key(self.key, self.place)
        self.place += 1
        return key


class Encoder(nn.Module):
    """L SAGE layers, ReLU and dropout between them."""

    def __init__(self, config: ModelSection, width_in: int) -> None:
        super().__init__()
        widths = [width_in] + [config.hidden] * (config.layers - 1) + [config.out]
        self.layers = nn.ModuleList(SageLayer(a, b, config.normalise) for a, b in pairwise(widths))
        self.widths = tuple(widths[1:])
        self.aggregator: Aggregator = config.aggregator
        self.normalise, self.dropout, self.input_dropout = config.normalise, config.dropout, config.input_dropout

    def activate(self, number: int, out: torch.Tensor) -> torch.Tensor:
        """Return layer `number`'s output as the next layer reads it: ReLU on all but the last layer."""
        return out if number == len(self.layers) - 1 else functional.relu(out)

    def forward(
        self, x: torch.Tensor | Inputs, stored_first_hop: bool, hops: list[Hop], drop: Dropout
    ) -> torch.Tensor:  # fmt: skip
        """Return the seeds' embeddings [seeds, out].

        x: inputs of all nodes [n, F], or, with the stored first hop, [n, 2F]: beside each its exact aggregated
        neighbourhood; otherwise the deepest hop is sampled like the others. hops: from the seeds outwards.
        """
        inwards = list(reversed(hops))
        layers = [layer for layer in self.layers if isinstance(layer, SageLayer)]
        # on CPU each layer activates what it reads, and adds the bias that layer 1 then leaves out
        delayed = len(layers) > 1 and _fusible(x, self.aggregator) and not self.normalise
        bias = None
        if stored_first_hop:
            h = layers[0].side_by_side(x, with_bias=not delayed)
            bias = layers[0].neighbour.bias
        elif isinstance(x, Inputs):
            raise ValueError("Inputs come with the stored first hop")
        else:
            h = layers[0].sampled(drop(x, self.input_dropout), inwards.pop(0), self.aggregator)
        for number, layer in enumerate(layers[1:]):
            if delayed:
                entering = Entering(*self._dropout(drop), bias if number == 0 else None)
                h = layer.sampled(h, inwards.pop(0), self.aggregator, entering)
            else:
                h = layer.sampled(self._after(number, h, drop), inwards.pop(0), self.aggregator)
        return self._after(len(layers) - 1, h, drop)

    def _dropout(self, drop: Dropout) -> tuple[float, int]:
        """Return the chance and the key of the next dropout between layers."""
        return (self.dropout, drop.next_key()) if drop.active and self.dropout > 0 else (0.0, 0)

    def _after(self, number: int, out: torch.Tensor, drop: Dropout) -> torch.Tensor:
        """Return what follows layer `number`'s sums in training: normalisation, ReLU, dropout; overwrites them on CPU."""
        last = number == len(self.layers) - 1
        if last and not self.normalise:
            return out
        if out.device.type == "cpu":
            p, key = (0.0, 0) if last else self._dropout(drop)
            return activate(out, normalise=self.normalise, relu=not last, p=p, key=key)
        h = self.activate(number, functional.normalize(out, dim=-1) if self.normalise else out)
        return h if last else drop(h, self.dropout)


class DotDecoder(nn.Module):
    """score(a, b) = a . b, a logit."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, drop: Dropout) -> torch.Tensor:
        """Return scores [...] of rows a, b [..., D], broadcast against each other."""
        return (a * b).sum(-1)

    def pooled(self, a: torch.Tensor, pool: torch.Tensor, drop: Dropout) -> torch.Tensor:
        """Return scores [P, K] of every row of a [P, D] against every row of the pool [K, D]: one GEMM."""
        return a @ pool.T


class MlpDecoder(nn.Module):
    """score(a, b) = MLP(a * b), a logit: OGB's LinkPredictor without its final sigmoid."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        widths = [config.out] + [config.decoder_hidden] * (config.decoder_layers - 1) + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = config.dropout

    def forward(self, a: torch.Tensor, b: torch.Tensor, drop: Dropout) -> torch.Tensor:
        """Return scores [...] of rows a, b [..., D], broadcast against each other."""
        h = a * b
        for layer in self.layers[:-1]:
            h = drop(functional.relu(layer(h)), self.dropout)
        out: torch.Tensor = self.layers[-1](h)
        return out.squeeze(-1)

    def pooled(self, a: torch.Tensor, pool: torch.Tensor, drop: Dropout) -> torch.Tensor:
        """Return scores [P, K] of every row of a [P, D] against every row of the pool [K, D]."""
        return self.forward(a[:, None, :], pool[None, :, :], drop)


class LinkPredictor(nn.Module):
    """Encoder and decoder; parameters are initialised from `seed` alone, so that every rank starts equal."""

    def __init__(self, config: ModelSection, width_in: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed) >> 1)
            self.encoder = Encoder(config, width_in)
            self.decoder: DotDecoder | MlpDecoder = DotDecoder() if config.decoder == "dot" else MlpDecoder(config)

    @property
    def num_parameters(self) -> int:
        """Number of trained scalars."""
        return sum(parameter.numel() for parameter in self.parameters())
