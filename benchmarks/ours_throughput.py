"""Our training steps on the core this process is pinned to, and the least time the arithmetic and the gather could take.

The trainer's own step, prefetch and optimizer; no validation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_trainer.allocator import restart_tuned

if TYPE_CHECKING:
    from horovod_trainer.data.batches import MicroBatch
    from horovod_trainer.data.device_batches import DeviceBatch
    from horovod_trainer.train import Trainer

Multiplication = tuple[int, int, int]  # [m, k] @ [k, n]
PHASE_STEPS = 3  # steps without a sampler thread, whose phases add up; and batches whose floor is measured
REPEATS = 3  # of every timed multiplication and gather; the quickest counts: it is a floor


def main() -> None:
    """Take the steps, measure the floor, print the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    restart_tuned()  # what the command itself does before anything heavy is loaded
    from horovod_trainer.data.batches import prefetch

    trainer = build(args.config, args.set)
    batch_size = trainer.schedule.batch_size
    seconds, cpu, _ = timed(trainer, trainer._batches(0), args.warmup, args.steps)
    own = prefetch(trainer.recipe, [(1, step, 0) for step in range(1 + PHASE_STEPS)], 0)
    in_turn, _, phases = timed(trainer, own, 1, PHASE_STEPS)
    batches = [trainer.recipe.build(2, step, 0) for step in range(PHASE_STEPS)]
    floors = [floor(trainer, batch) for batch in batches]
    floor_means = {key: sum(one[key] for one in floors) / len(floors) for key in floors[0]}
    answer = {"seconds_per_step": seconds, "edges_per_second": batch_size / seconds, "in_turn_seconds": in_turn}
    answer["cpu_seconds_per_step"] = cpu
    print(json.dumps({**answer, "phases": phases, **floor_means, "steps": args.steps}), flush=True)


def build(config: Path, overrides: list[str]) -> Trainer:
    """Return the trainer of one rank with one thread, its metrics kept nowhere."""
    from horovod_trainer.cli import set_threads
    from horovod_trainer.comm.base import Solo
    from horovod_trainer.config import load_config
    from horovod_trainer.data.store import open_store

    settings = load_config([config], [*overrides, "train.threads=1", "train.micro_batches=1"])
    store = open_store(Path(settings.data.store))
    comm = Solo()
    threads = set_threads(settings, comm)
    from horovod_trainer.train import Trainer

    return Trainer(settings, store, comm, threads)


def timed(
    trainer: Trainer, batches: Iterator[MicroBatch | DeviceBatch], warmup: int, steps: int
) -> tuple[float, float, dict[str, float]]:
    """Return mean seconds of `steps` steps after `warmup` more, their processor's seconds, and seconds of each phase."""
    for step in range(warmup):
        trainer._step(0, step, batches)
    trainer.timers.snapshot_and_reset()
    started, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        trainer._step(0, warmup + step, batches)
    seconds, cpu = (time.perf_counter() - started) / steps, (time.process_time() - cpu) / steps
    return seconds, cpu, {name: total / steps for name, total in trainer.timers.snapshot_and_reset().items()}


def multiplications(rows: list[int], widths: list[int]) -> list[Multiplication]:
    """Return a step's dense products: layer l makes [rows[l], widths[l + 1]] from rows and neighbourhoods side by side.

    Forward, the gradient of the weights, and from the second layer on the gradient of the input.
    """
    found = []
    for layer, (m, k, n) in enumerate(zip(rows, widths, widths[1:], strict=False)):
        found += [(m, 2 * k, n), (2 * k, m, n)]
        if layer > 0:
            found.append((m, n, 2 * k))
    return found


def flops(products: list[Multiplication]) -> int:
    """Return the floating-point operations of the products: 2 m k n each."""
    return sum(2 * m * k * n for m, k, n in products)


def quickest(action: Callable[[], object]) -> float:
    """Return the least seconds of a few calls, the first of which warms up."""
    action()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def floor(trainer: Trainer, batch: MicroBatch) -> dict[str, float]:
    """Return the seconds of a micro-batch's dense products and of its gather, each at the rate measured here and now.

    Both into reused memory: the products one by one at their shapes, the gather over the batch's own nodes from the
    mapped store. Everything else (sampling, aggregation, activations, the optimizer) counts nothing.
    """
    import torch

    encoder = trainer.model.encoder
    rows = [block.num_dst for block in reversed(batch.blocks)]
    if len(rows) < len(encoder.widths):  # the stored first hop: layer 1 makes a row for every node
        rows.insert(0, len(batch.nodes))
    width = trainer.recipe.features.width
    products = multiplications(rows, [width, *encoder.widths])
    gemm = 0.0
    for m, k, n in products:
        a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
        gemm += quickest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]  # bound now
    tables: list[Any] = [trainer.recipe.features.values]
    if trainer.recipe.stored_first_hop:
        tables.append(trainer.recipe.features.neighbour_sum)
    nodes = torch.from_numpy(batch.nodes)
    read = torch.empty(len(nodes), width)
    gather = sum(
        quickest(lambda table=table: torch.index_select(table, 0, nodes, out=read))  # type: ignore[misc]  # bound now
        for table in map(torch.from_numpy, tables)
    )
    gathered = read.nbytes * len(tables)
    return {
        "floor_seconds": gemm + gather,
        "gemm_seconds": gemm,
        "gather_seconds": gather,
        "gemm_gflop": flops(products) / 1e9,
        "gemm_gflop_per_second": flops(products) / 1e9 / gemm,
        "gather_gb": gathered / 1e9,
        "gather_gb_per_second": gathered / 1e9 / gather,
        "nodes": float(len(nodes)),
    }


if __name__ == "__main__":
    main()
