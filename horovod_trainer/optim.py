"""The optimizer and everything that happens between the backward and the step: one flat allreduce, agreement, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.swa_utils import AveragedModel

from horovod_trainer.comm.base import Communicator
from horovod_trainer.config import OptimSection
from horovod_trainer.errors import Diverged


class FlatGradients:
    """All gradients as views into one float32 buffer, with `sums` more scalars behind them that travel along.

    One collective a step moves the gradients and the step's (sum, count) metrics; nothing depends on the order in which
    a backward finishes, and a rank that ran no backward at all sends zeros.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], sums: int) -> None:
        self.parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = torch.zeros(total + sums, device=self.parameters[0].device)
        self.gradients, self.sums = self.buffer[:total], self.buffer[total:]
        offset = 0
        for parameter in self.parameters:
            end = offset + parameter.numel()
            parameter.grad = self.buffer[offset:end].view_as(parameter)
            offset = end

    def zero(self) -> None:
        """Clear gradients and sums."""
        self.buffer.zero_()

    def reduce(self, comm: Communicator) -> list[float]:
        """Sum gradients and sums over all ranks, in place; return the reduced sums."""
        comm.allreduce_(self.buffer)
        values: list[float] = self.sums.tolist()  # at once: on a GPU each look would wait for it
        return values

    def agree_finite(self, where: str) -> float:
        """Return the norm of the reduced gradient; raises Diverged, on all ranks alike, when anything is not finite.

        Judged after the reduction, where all ranks hold the same numbers, so no further collective is needed.
        """
        norm = float(torch.linalg.vector_norm(self.gradients))
        bad = [value for value in self.sums.tolist() if not math.isfinite(value)]
        if math.isfinite(norm) and not bad:
            return norm
        what = "loss" if bad else "gradient"
        advice = "lower optim.lr or set optim.clip_norm"
        raise Diverged(f"{where}: the {what} is not finite on at least one rank; {advice}", agreed=True)

    def clip(self, norm: float, limit: float | None) -> None:
        """Scale the gradient down to the norm `limit`."""
        if limit is not None and norm > limit:
            self.gradients.mul_(limit / norm)


class Adam:
    """Adam (Kingma, Ba 2015) or AdamW (Loshchilov, Hutter 2019) by torch's fused kernel, and their state.

    torch.optim's classes do the same, and load torch's compiler at their first step: 44 MiB and a second a rank.
    """

    def __init__(self, config: OptimSection, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.weight_decay, self.decoupled = config.weight_decay, config.kind == "adamw"
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter by its gradient, as torch.optim.Adam with its default betas and epsilon."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        adam(
            list(self.parameters), gradients, self.first, self.second, [], self.steps, fused=True,
            decoupled_weight_decay=self.decoupled, amsgrad=False, beta1=0.9, beta2=0.999, lr=lr,
            weight_decay=self.weight_decay, eps=1e-8, maximize=False,
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state's own tensors by name, to be saved or overwritten; gradients are no part of it."""
        kinds = {"first": self.first, "second": self.second, "steps": self.steps}
        return {f"{kind}.{number}": tensor for kind, group in kinds.items() for number, tensor in enumerate(group)}


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of the model that follows its weights as a moving average, a step each `update_parameters(model)`.

    After n updates the average keeps min(decay, (1 + n) / (10 + n)) of itself: it forgets the first weights soon.
    Averages of late iterates: Polyak, Juditsky 1992.
    """

    def follow(average: torch.Tensor, weights: torch.Tensor, updates: torch.Tensor | int) -> torch.Tensor:
        count = float(updates)
        return average.lerp(weights, 1.0 - min(decay, (1.0 + count) / (10.0 + count)))

    return AveragedModel(model, avg_fn=follow)


def learning_rate(config: OptimSection, step: int, total_steps: int, micro_batches: int) -> float:
    """Return the learning rate of global step `step` (from 0) of `total_steps`.

    Linear warm-up over warmup_steps, then constant, or linear or half-cosine decay to 0 at total_steps. scale_lr
    multiplies by G (Goyal et al. 2017) or sqrt(G), where G is the micro-batches in a step: the ratio of the global batch
    to the one that optim.lr was chosen for.
    """
    base = config.lr * {"none": 1.0, "linear": float(micro_batches), "sqrt": math.sqrt(micro_batches)}[config.scale_lr]
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "linear":
        return base * (1.0 - progress)
    return base * 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else base
