"""Two ranks of Horovod's against two processes that do the same micro-batches alone: what communication takes away.

On the graph of citation2's size, as the trainer is used there: its gradient is 0.8 MB and a step a fifth of a second on
one core, so both the bytes and the pace are those of real work. PubMed's steps are as long, but a fiftieth of the memory.
Each of the four processes has one core and one thread. They are loaded together and take turns of a few seconds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.alpha_beta import Work
from benchmarks.cache import BIG_CONFIG, big_store
from benchmarks.footprint import footprint
from benchmarks.jobs import Job, exposed, step_seconds, steps_within, take_turns
from horovod_trainer import console

TURNS, SECONDS = 24, 4.0  # of each side
WARM_STEPS = 20  # before the first turn


def measure_ceiling(cores: Sequence[int], overrides: Sequence[str], turns: int = TURNS) -> dict[str, Any]:
    """Return edges/s of both sides, the median over turns of their ratio, exposed communication and the step's work."""
    console.get_logger().info("two ranks, and the same two alone: %d turns of %.0f s each", turns, SECONDS)
    settings = [f"data.store={big_store()}", "train.threads=1", *overrides]
    arguments = ["--config", str(BIG_CONFIG), *(word for item in settings for word in ("--set", item))]
    with Job(2, cores, arguments, alone=True) as lonely, Job(2, cores, arguments) as world:
        about = lonely.ready() and world.ready()
        for job in (lonely, world):
            job.warm(WARM_STEPS)
        alone_spans, world_spans = take_turns([lonely, world], turns, SECONDS)
        memory = [footprint(rank["pid"]) for rank in about]
        alone_clocks, world_clocks = lonely.clocks(), world.clocks()
    batch = about[0]["batch_size"]
    lonely_steps, numbers = [], []
    for alone_span, world_span in zip(alone_spans, world_spans, strict=True):
        turn = [step_seconds(clock, steps_within([clock], alone_span)) for clock in alone_clocks]
        together = steps_within(world_clocks, world_span)
        if all(map(len, [*turn, together])):  # else the machine was too busy for two steps
            lonely_steps.append(turn)
            numbers.append(together)
    if len(numbers) < turns / 2:
        sys.exit(f"only {len(numbers)} of {turns} turns of {SECONDS} s have two steps of every rank")
    ceilings = [sum(batch / float(seconds.mean()) for seconds in turn) for turn in lonely_steps]
    rates = [2 * batch / float(step_seconds(world_clocks[0], part).mean()) for part in numbers]  # ranks end together
    ratios = [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)]
    each = [seconds for turn in lonely_steps for seconds in turn]
    deviation = float(
        np.sqrt(np.mean([seconds.var() for seconds in each]))
    )  # within turns: what drifts hits both alike
    return {
        "efficiency": statistics.median(ratios),
        "ratios": ratios,
        "edges_per_second": statistics.median(rates),
        "ceiling_edges_per_second": statistics.median(ceilings),
        "step_seconds": 2 * batch / statistics.median(rates),
        "bytes": about[0]["bytes"],
        "batch_size": batch,
        "uss_mib": [each.uss for each in memory if each is not None],
        "work": Work(float(np.concatenate(each).mean()), deviation, 0.0),
        **exposed(world_clocks, np.concatenate(numbers)),
    }
