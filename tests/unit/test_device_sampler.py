"""Micro-batches made on a device: what a run with them learns, that no step waits for the host, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from horovod_trainer.comm.base import Solo
from horovod_trainer.config import Config, DataSection, LossSection, ModelSection, Synthetic
from horovod_trainer.data.batches import Recipe
from horovod_trainer.data.device_batches import DeviceCandidates, DeviceRecipe
from horovod_trainer.data.device_sampler import Rows
from horovod_trainer.data.gather import Aggregator, Features
from horovod_trainer.device_forward import device_forward
from horovod_trainer.devices import resident
from horovod_trainer.errors import InvalidInput
from horovod_trainer.loss import balanced_correct, link_loss
from horovod_trainer.model import LinkPredictor
from horovod_trainer.telemetry import Telemetry, read_metrics
from horovod_trainer.train import Trainer
from tests.graphs import AGGREGATORS, World, random_pairs
from tests.raw import open_prepared

CPU, SHAPES_ONLY, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
NUMBERS = ("loss", "accuracy", "gradient_norm", "excluded_edge_share", "negatives_masked_share")
RUNS: dict[str, dict[str, Any]] = {
    "stored": {},
    "sampled": {"sampling": {"first_hop": "sampled", "neighbours": "not_later"}, "model": {"dropout": 0.3}},
    "shared": {"negatives": {"kind": "shared", "count": 8}, "model": {"aggregator": "max"}},
}


def steps(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Train and return the rows of all steps."""
    telemetry = Telemetry(folder, 0, {}, tensorboard=False)
    Trainer(config, open_prepared(config.data), Solo(), 1).run(telemetry)
    telemetry.close()
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_learns_the_same_by_either_sampler(kind: str, tmp_path: Path) -> None:
    graph = Synthetic(nodes=300, references=6.0, features=4, years=5)
    data = DataSection(source="synthetic", store=str(tmp_path / "store"), negatives=5, synthetic=graph)
    given = RUNS[kind]
    rows = []
    for sampler in ("cpu", "device"):
        config = Config.model_validate(
            {
                "data": data, "model": {"hidden": 8, "out": 8, **given.get("model", {})},
                "sampling": {"fanouts": (3, 2), **given.get("sampling", {}), "sampler": sampler},
                "negatives": given.get("negatives", {}),
                "train": {"epochs": 2, "batch_size": 128, "micro_batches": 2, "device": "cpu"},
            }
        )  # fmt: skip
        rows.append(steps(config, tmp_path / sampler))
    assert len(rows[0]) >= 8
    for want, got in zip(*rows, strict=True):
        assert {name: got[name] for name in NUMBERS} == pytest.approx({name: want[name] for name in NUMBERS}, abs=1e-4)


def recipe_of(stored: Aggregator | None, shared: bool, fanouts: tuple[int, ...] = (3, 2)) -> Recipe:
    world = World(60, random_pairs(1, 60, 300), [2000 + node % 7 for node in range(60)])
    return world.recipe(
        batch_size=20, fanouts=fanouts, stored=stored, not_later=stored is None, shared=shared, negatives=6
    )


class Boundary(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Counts the operations that take something of the host to the device, and refuses the way back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = (
            {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        assert not ("meta" in read and "cpu" in made), f"{func} comes back to the host"
        self.copied += "cpu" in read and "meta" in made
        return result


def shapes_of(value: Any) -> Any:
    """Return a resident recipe whose tensors, at any depth, have no content: whatever asks for it raises."""
    if isinstance(value, torch.Tensor):
        return value.to(SHAPES_ONLY)
    if isinstance(value, (DeviceRecipe, DeviceCandidates, Rows)):
        return replace(value, **{f.name: shapes_of(getattr(value, f.name)) for f in fields(value)})
    return SHAPES_ONLY if isinstance(value, torch.device) else value


def host_to_device(recipe: Recipe, then: Callable[[DeviceRecipe], object]) -> int:
    """Call `then` with the recipe as mere shapes; return how many operations took something there from the host."""
    there = shapes_of(DeviceRecipe.resident(recipe, CPU))
    boundary = Boundary()
    with boundary:
        then(there)
    return boundary.copied


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stored", [None, *AGGREGATORS])
def test_a_step_never_waits_for_the_device(stored: Aggregator | None, shared: bool) -> None:
    """From seed edges to gradients and sums on tensors without content, where any value or shape of one raises."""
    recipe = recipe_of(stored, shared)
    section = ModelSection(hidden=5, out=4, aggregator=stored or "mean", dropout=0.4, decoder="mlp")
    model = LinkPredictor(section, recipe.features.width, 0).to(SHAPES_ONLY)

    def step(there: DeviceRecipe) -> None:
        batch = there.build(0, 0, 0)
        assert len(batch.source) == 20
        for config in (LossSection(), LossSection(kind="margin"), LossSection(kind="softmax")):
            outputs = device_forward(model, batch)
            loss = link_loss(config, *outputs)
            torch.autograd.backward(loss)
            sums = torch.cat([torch.stack([loss.detach(), balanced_correct(*outputs)]), batch.sums()])
            assert (sums.device, sums.shape) == (SHAPES_ONLY, (6,))

    assert host_to_device(recipe, step) == 1, "the numbers of the seed edges, and nothing else"
    assert all(parameter.grad is not None for parameter in model.parameters())


ROUND_TRIPS: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda x: x.sum().item(),
    "a decision": lambda x: 1 if x.any() else 0,
    "a list": lambda x: x.tolist(),
    "a copy": lambda x: x.cpu(),
    "indexing by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
def test_the_proof_notices(kind: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError), match=r"(?i)meta|back to the host"):
        host_to_device(recipe_of("mean", shared=False), lambda there: ROUND_TRIPS[kind](there.values))


def test_the_proof_counts_what_is_sent() -> None:
    assert host_to_device(recipe_of("mean", shared=False), lambda there: there.values + torch.ones(1).to("meta")) == 1


def test_every_neighbour_is_refused_where_it_would_be_sampled() -> None:
    with pytest.raises(InvalidInput, match=r"sampling.fanouts: .* fixed number") as caught:
        resident(recipe_of(None, False, (3, -1)), "device", CPU)
    assert len(caught.value.problems) == 1
    assert resident(recipe_of("mean", False, (3, -1)), "device", CPU) is not None  # the deepest hop is stored


def test_auto_makes_batches_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRecipe, "resident", lambda recipe, device: f"on {device}")
    assert str(resident(recipe_of("mean", False), "auto", GPU)) == "on cuda:0"
    assert str(resident(recipe_of("mean", False), "device", CPU)) == "on cpu"
    assert resident(recipe_of("mean", False), "auto", CPU) is None
    assert resident(recipe_of("mean", False), "cpu", GPU) is None
    assert resident(recipe_of(None, False, (3, -1)), "auto", GPU) is None


def test_a_constant_input_is_resident_too() -> None:
    recipe = recipe_of("sum", False)
    recipe = replace(recipe, features=Features.constant(recipe.graph))
    got, want = DeviceRecipe.resident(recipe, CPU).build(0, 0, 0), recipe.build(0, 0, 0)
    torch.testing.assert_close(got.inputs[: len(want.nodes)], torch.from_numpy(want.dense()))
