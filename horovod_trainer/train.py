"""The training loop: fetch / forward / backward / reduce / step, then validate; reads top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from horovod_trainer import __version__
from horovod_trainer.assemble import build_evaluator, build_model, build_recipe, check_store, first_hop
from horovod_trainer.checkpoint import Checkpoint, Checkpoints, Tensors
from horovod_trainer.comm.base import Communicator, on_rank_0
from horovod_trainer.config import Config
from horovod_trainer.console import counted, get_logger, progress, stage_progress
from horovod_trainer.data.batches import MicroBatch, prefetch
from horovod_trainer.data.device_batches import DeviceBatch
from horovod_trainer.data.store import Store
from horovod_trainer.device_forward import device_forward
from horovod_trainer.devices import pick_device, resident
from horovod_trainer.documents import digest
from horovod_trainer.errors import Stopped
from horovod_trainer.forward import forward
from horovod_trainer.jit import compiled_before
from horovod_trainer.loss import balanced_correct, link_loss
from horovod_trainer.optim import Adam, FlatGradients, averaged, learning_rate
from horovod_trainer.state import Progress, TrainState
from horovod_trainer.stopping import StopWish
from horovod_trainer.telemetry import PhaseTimers, Telemetry
from horovod_trainer.watchdog import Watchdog
from horovod_trainer.world import check_agreement, check_placement

log = get_logger()

# what travels behind the gradients, summed over ranks; the last three are wishes: one rank's is everyone's
SUMS = (
    "loss", "correct", "excluded_pairs", "negatives", "negatives_masked", "negatives_citing", "out_of_time", "stop", "save",
)  # fmt: skip
EXCLUSION_WARNING = 0.05  # above this share a micro-batch trains on a graph unlike the one it is evaluated on


class Trainer:
    """One run on one rank. All ranks run the same code in the same order."""

    def __init__(
        self, config: Config, store: Store, comm: Communicator, threads: int, stop: StopWish | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:  # fmt: skip
        self.config, self.store, self.comm, self.threads = config, store, comm, threads
        self.stop, self.watchdog = stop or StopWish(), watchdog or Watchdog(None, print)
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
        # the average is the same on every rank, as the weights are
        average = averaged(self.model, config.optim.average) if config.optim.average else None
        self.state = TrainState(self.model, Adam(config.optim, self.flat.parameters), average)
        self.validation = build_evaluator(config, store, comm, threads, "valid")
        self.timers = PhaseTimers()
        self.checkpoints: Checkpoints | None = None
        self.bar = progress("train", self.total_steps, lines=False)
        self._warned = False
        self._clock = self._saved = time.monotonic()
        self.watchdog.describe = self._whereabouts

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress

    def _facts(self) -> dict[str, object]:
        """Return what every rank must agree on before the first step."""
        return {
            "config": digest(self.config.model_dump(mode="json")),
            "data": self.store.manifest["digest"],
            "steps per epoch": self.steps_per_epoch,
            "torch": torch.__version__,
        }

    def _whereabouts(self) -> str:
        return f"in phase {self.timers.latest or 'start'} after step {self.progress.step}"

    def restore(self, reached: Progress, tensors: Mapping[str, Tensors] | None) -> None:
        """Go on from a checkpoint, whose tensors rank 0 alone has; raises InvalidInput on every rank where they do not fit."""
        on_rank_0(self.comm, lambda: self.state.load(reached, tensors))
        if self.comm.rank != 0:
            self.state.load(reached, None)
        self.state.broadcast(self.comm)
        reached.late = self._too_late()

    def run(self, telemetry: Telemetry, checkpoints: Checkpoints | None = None, branch: bool = False) -> dict[str, Any]:
        """Train to the end and return the result: the best epoch's validation and test metrics over all queries.

        branch: goes on from another run's checkpoint, and begins with one of its own. Raises Stopped, on every rank, once a
        checkpoint is there, when any rank was asked to stop.
        """
        self.telemetry, self.checkpoints = telemetry, checkpoints
        self._say_what_runs()
        if self.progress.resumed_at:
            telemetry.log("resume", self.progress.step, self._epoch(), world_size=self.comm.size)
        self._clock = self._saved = time.monotonic()
        self.stop.heed()
        with self.bar:
            self.bar.reach(self.progress.step)
            if branch:
                self._save()
            try:
                self._train()
            except Stopped:
                self._save()
                raise
            self._tick()
            return self._finish()

    def _train(self) -> None:
        """Run epochs and validations until there is a reason to end, from wherever a checkpoint left off."""
        while (due := self._validation_due()) or not self.end_reason():
            if not due:
                self._train_epoch(self.progress.step // self.steps_per_epoch)
                continue
            self._validate(self._epoch())
            self._save()

    def _epoch(self) -> int:
        """Return the number, from 1, of the epoch that the last step was part of."""
        return -(-self.progress.step // self.steps_per_epoch)

    def end_reason(self) -> str:
        """Return why the run has ended, empty while it goes on: a function of progress and config, alike on all ranks."""
        state, train = self.progress, self.config.train
        if train.patience is not None and state.stale >= train.patience:
            return f"no better validation for {state.stale} evaluations (train.patience)"
        if state.step >= self.total_steps:
            by_epochs = self.total_steps == train.epochs * self.steps_per_epoch
            return "all epochs done" if by_epochs else f"train.max_steps = {train.max_steps} reached"
        return f"train.max_hours = {train.max_hours} reached" if state.late else ""

    def _validation_due(self) -> bool:
        step, every = self.progress.step, self.config.evaluate.every * self.steps_per_epoch
        return self.progress.validated != step and (step % every == 0 or bool(self.end_reason()))

    def _tick(self) -> None:
        """Count the time since the last call as time of training."""
        before, self._clock = self._clock, time.monotonic()
        self.progress.seconds += self._clock - before

    def _too_late(self) -> bool:
        """Return whether the hours that this run may train are over, those before a resumption included."""
        hours = self.config.train.max_hours
        return hours is not None and self.progress.seconds > 3600 * hours

    def _train_epoch(self, epoch: int) -> None:
        """Run what is left of one pass over the seed edges, or of the run."""
        first = self.progress.step - epoch * self.steps_per_epoch
        batches = self._batches(epoch, first)
        for step in range(first, self._steps_in(epoch)):
            sums = self._step(epoch, step, batches)
            self.progress.step += 1
            self.progress.late = sums["out_of_time"] > 0
            self._log_step(epoch, step, sums)
            if sums["stop"] > 0:
                raise Stopped(self._stop_sentence(), agreed=True)
            if sums["save"] > 0:
                self._save()
            if self.progress.late:
                return

    def _steps_in(self, epoch: int) -> int:
        return min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)

    def _batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch | DeviceBatch]:
        share = self.schedule.share(self.comm.rank, self.comm.size)
        work = [(epoch, step, micro) for step in range(first, self._steps_in(epoch)) for micro in share]
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

    def _step(self, epoch: int, step: int, batches: Iterator[MicroBatch | DeviceBatch]) -> dict[str, float]:
        """Take one optimizer step, the same on all ranks; return the step's sums over all ranks."""
        self.flat.zero()
        positives = self.schedule.positives(step)
        for _ in self.schedule.share(self.comm.rank, self.comm.size):
            self.watchdog.beat()
            with self.timers.phase("wait"):
                batch = next(batches)
            self._accumulate(batch, positives)
        self._tick()
        self.flat.sums[-3:] = torch.tensor([float(self._too_late()), float(self.stop.asked), float(self._save_due())])
        with self.timers.phase("allreduce"):
            sums = dict(zip(SUMS, self.flat.reduce(self.comm), strict=True))
        self.watchdog.beat()
        with self.timers.phase("optimizer"):
            norm = self.flat.agree_finite(f"epoch {epoch + 1}, step {self.progress.step + 1}")
            self.flat.clip(norm, self.config.optim.clip_norm)
            lr = learning_rate(self.config.optim, self.progress.step, self.total_steps, self.schedule.micro_batches)
            self.state.optimizer.step(lr)
            if self.state.averaged is not None:
                self.state.averaged.update_parameters(self.model)
        self.timers.step_done()
        return sums | {"positives": positives, "lr": lr, "gradient_norm": norm}

    def _save_due(self) -> bool:
        """Return whether a checkpoint is due after the step in progress, as this rank's clock has it."""
        wanted, since = self.config.checkpoint, time.monotonic() - self._saved
        by_step = wanted.every_steps is not None and (self.progress.step + 1) % wanted.every_steps == 0
        return by_step or (wanted.every_minutes is not None and since > 60 * wanted.every_minutes)

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

    def _validate(self, epoch: int) -> None:
        """Score the fixed validation subset and keep the best weights."""
        started = time.monotonic()
        held_out, queries = self.store.held_out("valid"), self.config.evaluate.valid_queries
        result = self.validation.run(
            self.state.judged, held_out, queries=queries, seed=self.config.train.seed, progress=self.watchdog.beat,
            between=self._heed_stop,
        )  # fmt: skip
        value = result.get("mrr", result["auc"])
        better = self.state.keep_best(value, epoch)
        state = self.progress
        state.validated = state.step
        state.validations.append({"step": state.step, "epoch": epoch, "value": value})
        self.timers.snapshot_and_reset()
        seconds = time.monotonic() - started
        self.telemetry.log("valid", state.step, epoch, **result, seconds=seconds)
        if self.comm.rank == 0:
            log.info(
                "epoch %d/%d  valid %s  (%s %.4f, epoch %d)  %.1f s", epoch, self.config.train.epochs,
                say_metrics(result), "new best" if better else "best", state.best_value, state.best_epoch, seconds,
            )  # fmt: skip

    def _heed_stop(self) -> None:
        """Raise Stopped, on all ranks, when any was asked to stop: a scoring is left between two of its parts."""
        wish = torch.tensor([int(self.stop.asked)])
        if int(self.comm.allreduce_(wish, "max")):
            raise Stopped(self._stop_sentence(), agreed=True)

    def _stop_sentence(self) -> str:
        return f"asked to stop: ended after step {self.progress.step}, which is saved; train --resume auto goes on from there"

    def _save(self) -> None:
        """Commit a checkpoint on rank 0, while the others wait to hear that it is there; raises on all when it is not."""
        self._tick()
        self._saved = self._clock
        if self.checkpoints is None:
            return
        checkpoints = self.checkpoints
        with self.timers.phase("save"):
            on_rank_0(self.comm, lambda: str(checkpoints.save(self._checkpoint())))
        self.timers.snapshot_and_reset()
        self.watchdog.beat()

    def _checkpoint(self) -> Checkpoint:
        """Return all that resuming needs, and what tells this run from another."""
        state, manifest = self.progress, self.store.manifest
        just_validated = state.validations and state.validations[-1]["step"] == state.step
        document = {
            "step": state.step,
            "value": state.validations[-1]["value"] if just_validated else None,
            "micro_batches": self.schedule.micro_batches,
            "progress": self.state.record(),
            "metrics_bytes": self.telemetry.commit(),
            "config": self.config.model_dump(mode="json"),
            "data": {"name": manifest["name"], "digest": manifest["digest"]},
            "versions": {"horovod_trainer": __version__, "torch": torch.__version__},
            "world": {"communicator": self.comm.name, "size": self.comm.size, "hosts": dict(self.hosts)},
        }
        return Checkpoint(document, self.state.groups())

    def _finish(self) -> dict[str, Any]:
        """Score everything with the best weights and return the result document."""
        self._heed_stop()
        self.model.load_state_dict(self.state.best)
        report = self.watchdog.counting(stage_progress)
        valid = self.validation.run(self.model, self.store.held_out("valid"), progress=report, between=self._heed_stop)
        # made only now: with the validation edges in it, its graph is a copy of the whole
        with self.watchdog.suspended():
            evaluator = build_evaluator(self.config, self.store, self.comm, self.threads, "test")
        test = evaluator.run(self.model, self.store.held_out("test"), progress=report, between=self._heed_stop)
        state = self.progress
        self.telemetry.log("test", state.step, state.best_epoch, **test)
        return {
            "test": test,
            "valid": valid,
            "validation_edges_in_test_graph": self.config.evaluate.use_valid_edges,
            "best_epoch": state.best_epoch,
            "steps": state.step,
            "ended": self.end_reason(),
            "resumed_at_steps": state.resumed_at,
            "seconds": state.seconds,
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


def say_metrics(result: dict[str, float]) -> str:
    """Return metrics as one line: MRR 0.4123  AUC 0.9012  ..."""
    shown = {"mrr": "MRR", "auc": "AUC", "mean_rank": "mean rank", "mrr_without_reciprocal": "MRR without reciprocal"}
    return "  ".join(f"{shown.get(name, name)} {value:.4g}" for name, value in result.items())
