"""Scaling: the seed project's table beside our rows, two ranks against two lonely ones, and what a model says of 512.

1. Rows: the same training (benchmarks/scaling.yaml) on 1, 2, 4 ranks, one core each as far as there are cores.
2. Ceiling: two ranks on the graph of citation2's size against two processes without communication (ceiling.py).
3. Model: an alpha-beta fit to allreduces measured here, with the compute measured here (alpha_beta.py); its error
   against what was measured, and what it says of other links and more ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alpha_beta import Fit, Link, Sample, Work, error_percent, fit_ring, hierarchical, ring, wire_bytes
from benchmarks.cache import ROOT, big_store
from benchmarks.ceiling import measure_ceiling
from benchmarks.footprint import horovodrun
from benchmarks.harness import end_on_terminate, finish
from benchmarks.jobs import Job, exposed, step_seconds
from horovod_trainer import console
from horovod_trainer.data.store import read_manifest
from horovod_trainer.telemetry import read_metrics

# workers, minutes, accuracy [%] as the seed project's blog has them; it does not say after how many epochs
REPORTED = [
    (1, 29.35, 83.07), (3, 20.21, 84.14), (5, 15.65, 84.77), (7, 14.39, 84.97), (15, 11.23, 85.08), (31, 9.88, 85.15),
]  # fmt: skip
CONFIG = ROOT / "benchmarks" / "scaling.yaml"
GLOBAL_BATCH = 1024  # seed edges a step of the rows, on any number of ranks
WARM = 5  # steps of a row that do not count: buffers grow, pages are read
# Gbit/s that a stream really gets, and microseconds until a small message has arrived
LINKS = ["25 GbE TCP:23:30", "100 Gb RoCE:92:5", "200 Gb HDR:186:3"]
NVLINK = Link("NVLink", 3e-6, 200e9)
PER_NODE = 8  # GPUs that NVLink joins
FUTURE = (8, 16, 32, 64, 128, 256, 512)
COLUMNS = [
    "workers", "source", "epochs", "minutes", "accuracy [%]", "speed-up", "efficiency", "speed-up of steps", "MRR", "edges/s",
    "exposed [ms/step]", "of it waiting", "ring [MB/step]", "cores", "PSS [MiB/rank]", "model error [%]", "remark",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured training. pss: MiB of a rank at the largest sum seen; work: as the rank with all the work has it.

    edges: seed edges a step, GLOBAL_BATCH where the micro-batches divide it.
    """

    workers: int
    result: dict[str, Any]
    bytes: int
    step_seconds: float
    waiting_ms: float
    transfer_ms: float
    pss: float
    work: Work
    edges: int


def main() -> None:
    """Measure, fit, predict, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1 2 4", help="numbers of ranks; 1 is always measured")
    parser.add_argument("--links", nargs="+", type=parse_link, default=[parse_link(text) for text in LINKS],
                        metavar="NAME:GBIT:MICROSECONDS", help="what a stream gets, what a small message takes")  # fmt: skip
    parser.add_argument("--step-seconds", type=float, help="predict for this compute time of a rank instead of ours")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, for every measured job")
    args = parser.parse_args()
    console.setup_logging(0)
    workers = sorted({1, *map(int, args.workers.split())})
    cores = sorted(os.sched_getaffinity(0))
    micro_batches = math.lcm(*workers)
    if micro_batches > GLOBAL_BATCH:
        parser.error(f"--workers {args.workers}: no {GLOBAL_BATCH} seed edges a step are the same for all of them")
    big_store()  # or say at once that it is missing
    end_on_terminate()
    source = prepare()
    rows = [measure_row(size, micro_batches, cores, args.set) for size in workers]
    ceiling = measure_ceiling(cores[:2], args.set) if len(cores) > 1 else None
    samples = [sample for size in sorted({2, *workers} - {1}) for sample in measure_allreduce(size, cores)]
    # ranks that share a core wait for it, not for the wire
    fit = fit_ring([sample for sample in samples if sample.ranks <= len(cores)] or samples)
    errors = {str(row.workers): error_of(row, rows[0].work, micro_batches, len(cores), fit) for row in rows[1:]}
    if ceiling:
        expected = ceiling["work"].seconds(1, 2) + fit.seconds(2, ceiling["bytes"])
        errors["2, citation2's size"] = error_percent(expected, ceiling["step_seconds"])
    work = ceiling["work"] if ceiling else rows[0].work
    if args.step_seconds:
        work = Work(args.step_seconds, work.deviation / work.micro_batch * args.step_seconds, 0.0)
    nbytes = ceiling["bytes"] if ceiling else rows[0].bytes
    future = [prediction for link in args.links for prediction in predict(work, nbytes, fit.overhead, link)]
    show(rows, ceiling, fit, errors, future, len(cores), samples, source)


def parse_link(text: str) -> Link:
    """Return the link of NAME:GBIT:MICROSECONDS; raises ArgumentTypeError."""
    try:
        name, gigabits, micros = text.rsplit(":", 2)
        return Link(name, float(micros) * 1e-6, float(gigabits) * 1e9 / 8)
    except ValueError as failure:
        raise argparse.ArgumentTypeError(f"want NAME:GBIT:MICROSECONDS, got {text!r} ({failure})") from None


def prepare() -> str:
    """Make the rows' store where it is not there yet; return what it was made from: without a network, no PubMed."""
    command = [sys.executable, "-m", "horovod_trainer", "prepare", "-c", str(CONFIG)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return str(read_manifest(ROOT / "data" / "pubmed")["source"]["kind"])


def measure_row(size: int, micro_batches: int, cores: Sequence[int], overrides: Sequence[str]) -> Row:
    """Train on `size` ranks to the end; every number of ranks computes the same steps."""
    console.get_logger().info("training on %s", console.counted(size, "rank"))
    shape = [f"train.micro_batches={micro_batches}", f"train.batch_size={GLOBAL_BATCH // micro_batches}", *overrides]
    arguments = ["--config", str(CONFIG), "--score", *(word for item in shape for word in ("--set", item))]
    with Job(size, cores, arguments) as job:
        result = job.wait()
        about, clocks = job.ready()[0], job.clocks()
        steps = [row["phases"] for row in read_metrics(job.out / "metrics.jsonl") if row["event"] == "step"][WARM:]
    numbers = np.arange(WARM, len(clocks[0]))
    shared = np.array([sum(phases[name] for name in ("wait", "forward", "backward", "count")) for phases in steps])
    each = micro_batches / size
    work = Work(
        float(shared.mean() / each), float(shared.std() / math.sqrt(each)),
        float(np.mean([phases["optimizer"] + phases["other"] for phases in steps])),
    )  # fmt: skip
    seconds = float(step_seconds(clocks[0], numbers).mean())
    return Row(size, result, about["bytes"], seconds, **exposed(clocks, numbers), pss=job.pss / size, work=work,
               edges=GLOBAL_BATCH // micro_batches * micro_batches)  # fmt: skip


def measure_allreduce(size: int, cores: Sequence[int]) -> list[Sample]:
    """Return what allreduces of several sizes take on `size` ranks."""
    console.get_logger().info("allreduces on %s", console.counted(size, "rank"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        arguments = ["--cores", ",".join(map(str, cores)), "--out", str(out)]
        command = horovodrun(sys.executable, size, "benchmarks.rank_allreduce", arguments)
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        measured = json.loads(out.read_text())
    sent = measured["loopback_bytes"]
    return [Sample(size, int(nbytes), seconds, sent[nbytes]) for nbytes, seconds in measured["seconds"].items()]


def error_of(row: Row, work: Work, micro_batches: int, cores: int, fit: Fit) -> float:
    """Return the model's error [%] for a row's step: the work of one rank shared out, ranks of one core in turn."""
    turns = max(1.0, row.workers / cores)
    compute = turns * work.seconds(micro_batches / row.workers, row.workers)
    return error_percent(compute + fit.seconds(row.workers, row.bytes), row.step_seconds)


def predict(work: Work, nbytes: int, overhead: float, link: Link) -> list[dict[str, Any]]:
    """Return step seconds and efficiency of a micro-batch per rank on more ranks: one a node, and PER_NODE a node."""
    alone = work.seconds(1, 1)
    found = []
    for ranks in FUTURE:
        compute = work.seconds(1, ranks) + overhead
        for shape, wire in (
            ("ring, 1 rank a node", ring(ranks, nbytes, link)),
            (f"hierarchical, {PER_NODE} a node", hierarchical(ranks // PER_NODE, PER_NODE, nbytes, NVLINK, link)),
        ):
            step = compute + wire
            found.append({"link": link.name, "shape": shape, "ranks": ranks, "wire_ms": 1e3 * wire, "step_ms": 1e3 * step,
                          "efficiency": alone / step, "speed_up": ranks * alone / step})  # fmt: skip
    return found


def show(
    rows: Sequence[Row], ceiling: dict[str, Any] | None, fit: Fit, errors: dict[str, float],
    future: Sequence[dict[str, Any]], cores: int, samples: Sequence[Sample], source: str,
) -> None:  # fmt: skip
    """Print the predictions, then the table; keep all."""
    columns = ["link", "shape", "ranks", "wire_ms", "step_ms", "efficiency", "speed_up"]
    console.table("What the model says of more ranks, a micro-batch each (what ranks ask each other first left out)", columns,
                  [[one[name] if isinstance(one[name], str) else float(f"{one[name]:.4g}") for name in columns]
                   for one in future])  # fmt: skip
    sent = [
        [one.ranks, one.nbytes, 1e3 * one.seconds, one.sent / one.ranks / 1e6, wire_bytes(one.ranks, one.nbytes) / 1e6]
        for one in samples
    ]
    console.table("Allreduces", ["ranks", "bytes", "ms", "sent by a rank [MB]", "a ring's [MB]"],
                  [[float(f"{value:.4g}") for value in one] for one in sent])  # fmt: skip
    summary: dict[str, Any] = {
        "efficiency_vs_ceiling": round(ceiling["efficiency"], 4) if ceiling else None,
        "edges_per_second": {row.workers: round(row.edges / row.step_seconds) for row in rows},
        "rows_trained_on": source,
        "oversubscribed": [row.workers for row in rows if row.workers > cores],
        "model_error_percent": {name: round(error, 1) for name, error in errors.items()},
        "predicted_efficiency_512": {
            f"{one['link']}, {one['shape']}": round(one["efficiency"], 3)
            for one in future
            if one["ranks"] == FUTURE[-1]
        },
    }
    if ceiling:
        kept = ("edges_per_second", "ceiling_edges_per_second", "waiting_ms", "transfer_ms")
        summary["ceiling"] = {name: round(ceiling[name], 2) for name in kept}
    details = {
        "rows": [{**vars(row), "work": vars(row.work)} for row in rows],
        "ceiling": ceiling and {**ceiling, "work": vars(ceiling["work"])},
        "allreduce": [vars(sample) for sample in samples],
        "fit": {
            "overhead_ms": 1e3 * fit.overhead,
            "alpha_us": 1e6 * fit.link.alpha,
            "gb_per_second": fit.link.beta / 1e9,
        },
        "predicted": list(future),
    }
    finish(
        "scaling", summary, title="Scaling, one thread a rank", columns=COLUMNS, details=details,
        rows=[*map(reported_row, REPORTED), *(measured_row(row, rows[0], cores, errors) for row in rows)],
        draw=lambda axes: draw(axes, rows, future),
    )  # fmt: skip


def reported_row(reported: tuple[int, float, float]) -> list[Any]:
    """Return the seed project's row; speed-up and efficiency follow from its minutes."""
    workers, minutes, accuracy = reported
    speed_up = REPORTED[0][1] / minutes
    return [workers, "reported", None, minutes, accuracy, speed_up, speed_up / workers, *[None] * 9, ""]


def measured_row(row: Row, one: Row, cores: int, errors: dict[str, float]) -> list[Any]:
    """Return a row of our own: speed-up of the minutes, last scoring included, as reported; of the steps beside it."""
    result = row.result
    speed_up = one.result["seconds"] / result["seconds"]
    return [
        row.workers, "measured", result["best_epoch"], result["seconds"] / 60, 100 * result["accuracy"], speed_up,
        speed_up / row.workers, one.step_seconds / row.step_seconds, result["test"]["mrr"], row.edges / row.step_seconds,
        row.waiting_ms + row.transfer_ms if row.workers > 1 else 0.0, row.waiting_ms if row.workers > 1 else 0.0,
        wire_bytes(row.workers, row.bytes) / 1e6, min(row.workers, cores), row.pss, errors.get(str(row.workers)),
        "oversubscribed" if row.workers > cores else "",
    ]  # fmt: skip


def draw(axes: Any, rows: Sequence[Row], future: Sequence[dict[str, Any]]) -> None:
    """Draw speed-ups: reported, measured, predicted."""
    top = max(FUTURE)
    axes.plot([1, top], [1, top], color="0.8", label="ideal")
    axes.plot([r[0] for r in REPORTED], [REPORTED[0][1] / r[1] for r in REPORTED], "s-", label="seed project, reported")
    axes.plot([row.workers for row in rows], [rows[0].step_seconds / row.step_seconds for row in rows], "o-",
              label="measured, steps of the same seed edges")  # fmt: skip
    for name in dict.fromkeys((one["link"], one["shape"]) for one in future):
        points = [(one["ranks"], one["speed_up"]) for one in future if (one["link"], one["shape"]) == name]
        style = ":" if name[1].startswith("ring") else "--"
        axes.plot(*zip(*points, strict=True), style, label=f"predicted, a micro-batch a rank: {name[0]}, {name[1]}")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed-up")
    axes.legend(fontsize="x-small")


if __name__ == "__main__":
    main()
