"""The training loop: fetch / forward / backward / reduce / step, then validate; reads top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from horovod_trainer.aggregate import Hop
from horovod_trainer.assemble import build_evaluator, build_model, build_recipe, check_store, first_hop
from horovod_trainer.comm.base import Communicator
from horovod_trainer.config import Config
from horovod_trainer.console import counted, get_logger, progress, stage_progress
from horovod_trainer.data.batches import MicroBatch, Recipe, prefetch
from horovod_trainer.data.device_batches import DeviceBatch, DeviceRecipe
from horovod_trainer.data.gather import Inputs
from horovod_trainer.data.sampler import ALL
from horovod_trainer.data.store import Store
from horovod_trainer.device_forward import device_forward
from horovod_trainer.documents import digest
from horovod_trainer.errors import InvalidInput, Problem
from horovod_trainer.jit import compiled_before
from horovod_trainer.loss import balanced_correct, link_loss
from horovod_trainer.model import Dropout, LinkPredictor
from horovod_trainer.optim import Adam, FlatGradients, averaged, learning_rate
from horovod_trainer.telemetry import PhaseTimers, Telemetry
from horovod_trainer.world import check_agreement, check_placement

log = get_logger()

# what travels behind the gradients, summed over ranks
SUMS = ("loss", "correct", "excluded_pairs", "negatives", "negatives_masked", "negatives_citing", "out_of_time")
EXCLUSION_WARNING = 0.05  # above this share a micro-batch trains on a graph unlike the one it is evaluated on


@dataclass
class Progress:
    """How far a run has come, and the best weights so far by validation MRR (or, without one, by AUC)."""

    step: int = 0
    best_value: float = -math.inf
    best_epoch: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    stale: int = 0
    ended: str = "all epochs done"


class Trainer:
    """One run on one rank. All ranks run the same code in the same order."""

    def __init__(self, config: Config, store: Store, comm: Communicator, threads: int) -> None:
        self.config, self.store, self.comm, self.threads = config, store, comm, threads
        self.hosts = check_placement(comm, config.launch)
        check_store(config, store)
        self.device = pick_device(config.train.device, comm.local_rank)
        self.recipe = build_recipe(config, store, comm.size)
        self.resident = resident(self.recipe, config.sampling.sampler, self.device)
        self.schedule = self.recipe.schedule
        self.steps_per_epoch = self.schedule.steps_per_epoch
        self.total_steps = min(config.train.epochs * self.steps_per_epoch, config.train.max_steps or 2**62)
        check_agreement(comm, self._facts())
        self.model = build_model(config, self.recipe.features.width).to(self.device)
        comm.broadcast_([*self.model.parameters(), *self.model.buffers()])
        self.flat = FlatGradients(self.model.parameters(), len(SUMS))
        self.optimizer = Adam(config.optim, self.flat.parameters)
        # the same on every rank, as the weights are
        self.averaged = averaged(self.model, config.optim.average) if config.optim.average else None
        self.validation = build_evaluator(config, store, comm, threads, "valid")
        self.timers = PhaseTimers()
        self.progress = Progress()
        self.bar = progress("train", self.total_steps, lines=False)
        self._warned = False

    def _facts(self) -> dict[str, object]:
        """Return what every rank must agree on before the first step."""
        return {
            "config": digest(self.config.model_dump(mode="json")),
            "data": self.store.manifest["digest"],
            "steps per epoch": self.steps_per_epoch,
            "torch": torch.__version__,
        }

    def run(self, telemetry: Telemetry) -> dict[str, Any]:
        """Train to the end and return the result: the best epoch's validation and test metrics over all queries."""
        self.telemetry = telemetry
        self._say_what_runs()
        started = time.monotonic()
        deadline = started + 3600 * self.config.train.max_hours if self.config.train.max_hours else math.inf
        with self.bar:
            for epoch in range(self.config.train.epochs):
                keep_going = self._train_epoch(epoch, deadline)
                last = not keep_going or epoch == self.config.train.epochs - 1
                if last or (epoch + 1) % self.config.evaluate.every == 0:
                    keep_going = self._validate(epoch) and keep_going
                if not keep_going:
                    break
        return self._finish(time.monotonic() - started)

    def _train_epoch(self, epoch: int, deadline: float) -> bool:
        """Run one pass over the seed edges; return whether to go on."""
        batches = self._batches(epoch)
        for step in range(self._steps_in(epoch)):
            sums = self._step(epoch, step, batches, time.monotonic() > deadline)
            self.progress.step += 1
            self._log_step(epoch, step, sums)
            if sums["out_of_time"] > 0:
                self.progress.ended = f"train.max_hours = {self.config.train.max_hours} reached"
                return False
        if self.progress.step >= self.total_steps and epoch + 1 < self.config.train.epochs:
            self.progress.ended = f"train.max_steps = {self.config.train.max_steps} reached"
            return False
        return True

    def _steps_in(self, epoch: int) -> int:
        return min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)

    def _batches(self, epoch: int) -> Iterator[MicroBatch | DeviceBatch]:
        share = self.schedule.share(self.comm.rank, self.comm.size)
        work = [(epoch, step, micro) for step in range(self._steps_in(epoch)) for micro in share]
        if self.resident is not None:  # the device runs behind the host as it is: nothing to build ahead
            return (self.resident.build(*item) for item in work)
        return prefetch(self.recipe, work, self._ahead())

    def _ahead(self) -> int:
        """Return how many micro-batches are sampled ahead.

        With one core and no other rank to wait for, a thread's turns on the core cost 6 % and hide nothing.
        """
        wanted = self.config.train.prefetch
        idle_elsewhere = self.threads > 1 or self.comm.size > 1 or self.device.type != "cpu"
        return int(idle_elsewhere) if wanted is None else wanted

    def _step(self, epoch: int, step: int, batches: Iterator[MicroBatch | DeviceBatch], late: bool) -> dict[str, float]:
        """Take one optimizer step, the same on all ranks; return the step's sums over all ranks."""
        self.flat.zero()
        positives = self.schedule.positives(step)
        for _ in self.schedule.share(self.comm.rank, self.comm.size):
            with self.timers.phase("wait"):
                batch = next(batches)
            self._accumulate(batch, positives)
        self.flat.sums[SUMS.index("out_of_time")] = float(late)
        with self.timers.phase("allreduce"):
            sums = dict(zip(SUMS, self.flat.reduce(self.comm), strict=True))
        with self.timers.phase("optimizer"):
            norm = self.flat.agree_finite(f"epoch {epoch + 1}, step {self.progress.step + 1}")
            self.flat.clip(norm, self.config.optim.clip_norm)
            lr = learning_rate(self.config.optim, self.progress.step, self.total_steps, self.schedule.micro_batches)
            self.optimizer.step(lr)
            if self.averaged is not None:
                self.averaged.update_parameters(self.model)
        self.timers.step_done()
        return sums | {"positives": positives, "lr": lr, "gradient_norm": norm}

    def _accumulate(self, batch: MicroBatch | DeviceBatch, positives: int) -> None:
        """Add one micro-batch's gradient, weighted by the step's global number of positives, and its sums."""
        with self.timers.phase("forward"):
            if isinstance(batch, DeviceBatch):
                pos, neg, mask = device_forward(self.model, batch)
            else:
                pos, neg, mask = forward(self.model, batch, self.recipe, self.device)
            loss = link_loss(self.config.loss, pos, neg, mask)
        with self.timers.phase("backward"):
            torch.autograd.backward(loss / positives)
        with self.timers.phase("count"), torch.no_grad():
            trained = torch.stack([loss.detach(), balanced_correct(pos, neg, mask)])
            values = torch.cat([trained, torch.as_tensor(batch.sums(), device=self.device)])
            self.flat.sums[: len(values)] += values

    def _log_step(self, epoch: int, step: int, sums: dict[str, float]) -> None:
        """Write the step to the metrics file, and every log_every steps to the console."""
        positives, edges = sums["positives"], max(1, len(self.store.indices))
        share = 2 * sums["excluded_pairs"] / edges / -(-positives // self.schedule.batch_size)  # of a micro-batch
        drawn = max(1.0, sums["negatives"])
        phases = self.timers.snapshot_and_reset()
        seconds = max(1e-9, sum(phases.values()))
        row = {
            "loss": sums["loss"] / positives,
            "accuracy": sums["correct"] / positives,
            "lr": sums["lr"],
            "gradient_norm": sums["gradient_norm"],
            "excluded_edge_share": share,
            "negatives_masked_share": sums["negatives_masked"] / drawn,
            "negatives_true_edge_share": sums["negatives_citing"] / drawn,
            "edges_per_second": positives / seconds,
            "seconds": seconds,
        }
        self.telemetry.log("step", self.progress.step, epoch + 1, **row, phases=phases)
        if share > EXCLUSION_WARNING and not self._warned and self.comm.rank == 0:
            self._warned = True
            log.warning(
                "%.1f %% of all graph edges are target pairs of one micro-batch and left out: lower train.batch_size",
                100 * share,
            )
        self.bar.advance(1, f"loss {row['loss']:.4f}")
        if self.bar.live:
            return
        if self.comm.rank == 0 and (self.progress.step % self.config.train.log_every == 0 or step == 0):
            # the ranks of softmax's scores mean something, their zero does not
            accuracy = "" if self.config.loss.kind == "softmax" else f"accuracy@0.5 {row['accuracy']:.3f}  "
            log.info(
                "epoch %d/%d  step %d/%d  loss %.4f  %slr %.2g  %s edges/s",
                epoch + 1, self.config.train.epochs, self.progress.step, self.total_steps,
                row["loss"], accuracy, row["lr"], f"{row['edges_per_second']:,.0f}",
            )  # fmt: skip

    def _validate(self, epoch: int) -> bool:
        """Score the fixed validation subset, keep the best weights; return False when patience has run out."""
        started = time.monotonic()
        held_out, queries = self.store.held_out("valid"), self.config.evaluate.valid_queries
        model = self.model if self.averaged is None else cast(LinkPredictor, self.averaged.module)
        result = self.validation.run(model, held_out, queries=queries, seed=self.config.train.seed)
        value = result.get("mrr", result["auc"])
        state = self.progress
        better = value > state.best_value
        if better:
            state.best_value, state.best_epoch, state.stale = value, epoch + 1, 0
            state.best_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        else:
            state.stale += 1
        self.timers.snapshot_and_reset()
        seconds = time.monotonic() - started
        self.telemetry.log("valid", state.step, epoch + 1, **result, seconds=seconds)
        if self.comm.rank == 0:
            log.info(
                "epoch %d/%d  valid %s  (%s %.4f, epoch %d)  %.1f s", epoch + 1, self.config.train.epochs,
                say_metrics(result), "new best" if better else "best", state.best_value, state.best_epoch, seconds,
            )  # fmt: skip
        patience = self.config.train.patience
        if patience is not None and state.stale >= patience:
            state.ended = f"no better validation for {state.stale} evaluations (train.patience)"
            return False
        return True

    def _finish(self, seconds: float) -> dict[str, Any]:
        """Score everything with the best weights and return the result document."""
        self.model.load_state_dict(self.progress.best_weights)
        valid = self.validation.run(self.model, self.store.held_out("valid"), progress=stage_progress)
        # made only now: with the validation edges in it, its graph is a copy of the whole
        evaluator = build_evaluator(self.config, self.store, self.comm, self.threads, "test")
        test = evaluator.run(self.model, self.store.held_out("test"), progress=stage_progress)
        self.telemetry.log("test", self.progress.step, self.progress.best_epoch, **test)
        return {
            "test": test,
            "valid": valid,
            "validation_edges_in_test_graph": self.config.evaluate.use_valid_edges,
            "best_epoch": self.progress.best_epoch,
            "steps": self.progress.step,
            "ended": self.progress.ended,
            "seconds": seconds,
            "parameters": self.model.num_parameters,
            "first_hop": first_hop(self.config, self.store).reason,
            "data": {"name": self.store.manifest["name"], "digest": self.store.manifest["digest"]},
            "world": {"communicator": self.comm.name, "size": self.comm.size, "hosts": dict(self.hosts)},
        }

    def _say_what_runs(self) -> None:
        if self.comm.rank != 0:
            return
        config, schedule = self.config, self.schedule
        log.info(
            "%s on %s by %s; %s parameters on %s; %s seed edges, %s per epoch of %d x %d",
            counted(self.comm.size, "rank"), counted(len(self.hosts), "host"), self.comm.name,
            f"{self.model.num_parameters:,}", self.device, f"{schedule.num_edges:,}", counted(self.steps_per_epoch, "step"),
            schedule.micro_batches, schedule.batch_size,
        )  # fmt: skip
        if not compiled_before("_sum_rows"):
            log.info("compiling kernels: some 15 s, once where a cache can be written")
        log.info("first hop: %s", first_hop(config, self.store).reason)
        if self.resident is not None:
            log.info("micro-batches are made on %s, with the graph and the features in its memory", self.device)
        if schedule.micro_batches % self.comm.size:
            log.warning(
                "train.micro_batches = %d does not divide over %d ranks: some wait for others in every step",
                schedule.micro_batches, self.comm.size,
            )  # fmt: skip
        if not config.sampling.exclude_targets:
            log.warning("sampling.exclude_targets is off: the model sees the answers; use it for comparison only")


def forward(
    model: LinkPredictor, batch: MicroBatch, recipe: Recipe, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pos [P], neg [P, K] and mask [P, K] of a micro-batch; gradients reach every parameter, P = 0 included."""
    drop = Dropout(batch.dropout_key, model.training)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    hops = [Hop.of(block, model.encoder.aggregator) for block in batch.blocks]
    gathered_later = isinstance(batch.inputs, Inputs) and device.type == "cpu"
    h = model.encoder(batch.inputs if gathered_later else tensor(batch.dense()), batch.stored_first_hop, hops, drop)
    # picked at once: each pick's gradient is a table of all rows
    wanted = np.concatenate([batch.source, batch.target, batch.tails.ravel()])
    a, b, tails = h.index_select(0, tensor(wanted)).split([len(batch.source), len(batch.target), batch.tails.size])
    pos = model.decoder(a, b, drop)
    if batch.negatives.shared:
        neg = model.decoder.pooled(a, tails, drop)
    else:
        neg = model.decoder(a[:, None, :], tails.view(len(a), recipe.negative_count, h.shape[1]), drop)
    return pos, neg.reshape(len(a), -1 if len(a) else recipe.negative_count), tensor(batch.negatives.valid)


def resident(recipe: Recipe, sampler: str, device: torch.device) -> DeviceRecipe | None:
    """Return the recipe resident on the device where batches are made there (sampling.sampler), else None.

    auto makes them there on a GPU, unless a sampled hop takes every neighbour, which the device refuses.
    """
    chosen = sampler == "device" or (sampler == "auto" and device.type == "cuda" and ALL not in recipe.hops)
    return DeviceRecipe.resident(recipe, device) if chosen else None


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return this rank's device: cuda:local_rank when there is one (or asked for), otherwise the CPU."""
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        devices = torch.cuda.device_count()  # 0 in a CPU build of torch
        if local_rank >= devices:
            message = f"local rank {local_rank} needs a GPU of its own, torch sees {devices}; use cpu or fewer slots"
            raise InvalidInput(Problem("train.device", message, wanted))
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def say_metrics(result: dict[str, float]) -> str:
    """Return metrics as one line: MRR 0.4123  AUC 0.9012  ..."""
    shown = {"mrr": "MRR", "auc": "AUC", "mean_rank": "mean rank", "mrr_without_reciprocal": "MRR without reciprocal"}
    return "  ".join(f"{shown.get(name, name)} {value:.4g}" for name, value in result.items())
