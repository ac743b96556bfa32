"""Between backward and step: one buffer, the same gradient for any number of ranks, agreement, schedules."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from horovod_trainer.comm.base import Communicator, Solo, ThreadWorld
from horovod_trainer.config import LossSection, ModelSection, OptimSection
from horovod_trainer.data.batches import Recipe
from horovod_trainer.errors import Diverged, ExitCode
from horovod_trainer.forward import forward
from horovod_trainer.loss import link_loss
from horovod_trainer.model import LinkPredictor
from horovod_trainer.optim import Adam, FlatGradients, averaged, learning_rate
from tests.graphs import World, random_pairs

CPU = torch.device("cpu")


def accumulate(
    flat: FlatGradients, model: LinkPredictor, recipe: Recipe, comm: Communicator, epoch: int, step: int
) -> float:
    """Run this rank's share of a step and reduce; return the loss per positive over all ranks."""
    flat.zero()
    positives = recipe.schedule.positives(step)
    for micro in recipe.schedule.share(comm.rank, comm.size):
        pos, neg, mask = forward(model, recipe.build(epoch, step, micro), recipe, CPU)
        loss = link_loss(LossSection(kind="softmax"), pos, neg, mask)
        torch.autograd.backward(loss / positives)
        flat.sums[0] += loss.detach()
        flat.sums[1] += len(pos)
    loss_sum, count = flat.reduce(comm)
    assert count == positives
    return loss_sum / count


def setting(aggregator: Any, shared: bool) -> tuple[Recipe, LinkPredictor]:
    """Return 205 edges in steps of 4 x 16: 3 full steps, then one of 13 with three empty micro-batches; dropout on."""
    recipe = World(60, random_pairs(0, 60, 205)).recipe(
        batch_size=16, micro_batches=4, fanouts=(4, 4), shared=shared, negatives=8, width=6, stored=aggregator
    )
    config = ModelSection(hidden=16, out=16, dropout=0.5, aggregator=aggregator, decoder="mlp", decoder_hidden=8)
    return recipe, LinkPredictor(config, 6, 0)


@pytest.mark.parametrize(("aggregator", "shared"), [("mean", True), ("sum", False), ("max", True)])
def test_the_gradient_is_the_same_however_the_micro_batches_are_shared_out(aggregator: Any, shared: bool) -> None:
    recipe, model = setting(aggregator, shared)
    assert recipe.schedule.steps_per_epoch == 4
    assert recipe.schedule.positives(3) == 13
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(comm: Communicator) -> list[torch.Tensor]:
        mine = copies[comm.rank]
        flat = FlatGradients(mine.parameters(), 2)
        steps = []
        for step in range(4):
            accumulate(flat, mine, recipe, comm, 0, step)
            steps.append(flat.buffer.clone())
        return steps

    (want,) = ThreadWorld(1).run(rank)
    assert all(float(step.norm()) > 0.01 for step in want)
    for size in (2, 3, 4):
        results = ThreadWorld(size).run(rank)
        for result in results:
            for step in range(4):
                assert torch.equal(result[step], results[0][step]), "ranks hold different bits"
                torch.testing.assert_close(result[step], want[step], rtol=1e-5, atol=1e-5)


def test_fifty_steps_have_the_same_loss_curve_on_one_two_and_four_ranks() -> None:
    recipe, model = setting("mean", True)

    def rank(comm: Communicator, copies: list[LinkPredictor]) -> list[float]:
        mine = copies[comm.rank]
        flat = FlatGradients(mine.parameters(), 2)
        optimizer = Adam(OptimSection(), flat.parameters)
        curve = []
        for number in range(50):
            curve.append(accumulate(flat, mine, recipe, comm, *divmod(number, 4)))
            optimizer.step(0.01)
        return curve

    curves = []
    for size in (1, 2, 4):
        copies = [copy.deepcopy(model) for _ in range(size)]
        results = ThreadWorld(size).run(partial(rank, copies=copies))
        assert all(result == results[0] for result in results)
        curves.append(results[0])
    assert curves[0][-1] < curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def test_gradients_are_views_that_survive_steps_and_zeroing() -> None:
    model = two_layers()
    flat = FlatGradients(model.parameters(), 2)
    optimizer = Adam(OptimSection(), flat.parameters)
    for _ in range(3):
        flat.zero()
        torch.autograd.backward(model(torch.ones(2, 3)).sum())
        flat.sums[1] += 5.0
        assert flat.reduce(Solo()) == [0.0, 5.0]
        start = flat.buffer.data_ptr()
        for parameter in flat.parameters:
            assert parameter.grad is not None
            assert start <= parameter.grad.data_ptr() < start + 4 * len(flat.gradients)
        plain = copy.deepcopy(model)
        for parameter in plain.parameters():
            parameter.grad = None
        torch.autograd.backward(plain(torch.ones(2, 3)).sum())
        grads = [parameter.grad.ravel() for parameter in plain.parameters() if parameter.grad is not None]
        assert torch.equal(flat.gradients, torch.cat(grads))
        before = flat.parameters[0].detach().clone()
        optimizer.step(0.1)
        assert not torch.equal(before, flat.parameters[0]), "the optimizer reads the buffer"
    flat.zero()
    assert not flat.buffer.any()


def test_a_rank_without_work_sends_zeros() -> None:
    def rank(comm: Communicator) -> float:
        parameter = nn.Parameter(torch.ones(2))
        flat = FlatGradients([parameter], 1)
        flat.zero()
        if comm.rank == 0:
            torch.autograd.backward((parameter * 3.0).sum())
        flat.reduce(comm)
        assert parameter.grad is not None
        return float(parameter.grad[0])

    assert ThreadWorld(3).run(rank) == [3.0] * 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_one_ranks_infinity_is_every_ranks_error(value: float, where: str) -> None:
    def rank(comm: Communicator) -> list[Diverged]:
        flat = FlatGradients([nn.Parameter(torch.ones(4))], 2)
        flat.zero()
        if comm.rank == 2:
            (flat.gradients if where == "gradient" else flat.sums)[1] = value
        flat.reduce(comm)
        try:
            flat.agree_finite("step 7")
        except Diverged as failure:
            return [failure]
        return []

    for failures in ThreadWorld(4).run(rank):
        (failure,) = failures
        assert failure.agreed
        assert failure.exit_code is ExitCode.DIVERGED
        assert "step 7" in str(failure)
        assert where in str(failure)


def test_opposite_infinities_do_not_cancel() -> None:
    def rank(comm: Communicator) -> None:
        flat = FlatGradients([nn.Parameter(torch.ones(1))], 1)
        flat.gradients[0] = math.inf if comm.rank else -math.inf
        flat.reduce(comm)
        flat.agree_finite("here")

    with pytest.raises(Diverged):
        ThreadWorld(2).run(rank)


def test_norm_and_clipping() -> None:
    flat = FlatGradients([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))], 1)
    flat.buffer.copy_(torch.tensor([3.0, 0.0, 4.0, 99.0]))
    norm = flat.agree_finite("here")
    assert norm == pytest.approx(5.0)
    flat.clip(norm, None)
    flat.clip(norm, 5.5)
    assert flat.gradients.tolist() == [3.0, 0.0, 4.0]
    flat.clip(norm, 1.0)
    torch.testing.assert_close(flat.gradients, torch.tensor([0.6, 0.0, 0.8]))
    assert float(flat.sums[0]) == 99.0


def rates(steps: list[int], total: int = 100, micro_batches: int = 4, **settings: Any) -> list[float]:
    config = OptimSection(lr=0.1, **settings)
    return [learning_rate(config, step, total, micro_batches) for step in steps]


def test_learning_rate_schedules() -> None:
    assert rates([0, 50, 99, 200]) == [0.1] * 4
    assert rates([0, 1, 3, 4, 50], warmup_steps=4) == pytest.approx([0.025, 0.05, 0.1, 0.1, 0.1])
    assert rates([0, 25, 50, 99, 100, 150], schedule="linear") == pytest.approx([0.1, 0.075, 0.05, 0.001, 0.0, 0.0])
    assert rates([20, 60, 100], schedule="linear", warmup_steps=20) == pytest.approx([0.1, 0.05, 0.0])
    half_root = 0.05 * (1 + math.sqrt(0.5))
    assert rates([0, 25, 50, 100], schedule="cosine") == pytest.approx([0.1, half_root, 0.05, 0.0])
    assert rates([0, 9], total=5, schedule="cosine", warmup_steps=10) == pytest.approx([0.01, 0.1])


def test_learning_rate_scales_with_the_global_batch() -> None:
    assert rates([7], scale_lr="linear") == pytest.approx([0.4])
    assert rates([7], scale_lr="sqrt") == pytest.approx([0.2])
    assert rates([0], scale_lr="linear", warmup_steps=2) == pytest.approx([0.2])


@pytest.mark.parametrize(("kind", "theirs"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_is_torchs(kind: Any, theirs: Any) -> None:
    """Bit for bit over some steps with changing rates, weight decay included."""
    ours, plain = two_layers(), two_layers()
    optimizer = Adam(OptimSection(kind=kind, weight_decay=0.25), list(ours.parameters()))
    expected = theirs(plain.parameters(), weight_decay=0.25, fused=True)
    for step in range(5):
        for model in (ours, plain):
            model.zero_grad()
            torch.autograd.backward(model(torch.full((2, 3), step - 1.5)).square().sum())
        optimizer.step(0.1 / (step + 1))
        expected.param_groups[0]["lr"] = 0.1 / (step + 1)
        expected.step()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_step_does_not_load_torchs_compiler() -> None:
    """It would take 44 MiB and a second of every rank."""
    code = (
        "import sys, torch; from horovod_trainer.optim import Adam; from horovod_trainer.config import OptimSection\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); Adam(OptimSection(), [p]).step(0.1)\n"
        "assert float(p.detach()[0]) < 1; sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_average_forgets_the_first_weights_and_follows_the_last() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = averaged(model, 0.5)
    by_hand = None
    for updates, value in enumerate([8.0, 4.0, 2.0, 6.0]):
        model.weight.data.fill_(value)
        average.update_parameters(model)
        # the first is taken as it is; then (1 + n) / (10 + n) is kept, and never more than 0.5
        kept = [0.0, 2 / 11, 3 / 12, 4 / 13][updates]
        by_hand = value if by_hand is None else kept * by_hand + (1 - kept) * value
        assert average.module.get_parameter("weight").item() == pytest.approx(by_hand)
    for _ in range(30):
        average.update_parameters(model)
    model.weight.data.fill_(10.0)
    average.update_parameters(model)
    assert average.module.get_parameter("weight").item() == pytest.approx(8.0, abs=1e-3)
    assert model.weight.item() == 10.0
