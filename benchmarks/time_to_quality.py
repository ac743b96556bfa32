"""Wall-clock seconds to the best validation MRR that PyG reaches on pubmed-temporal, PyG's and ours, on the same cores.

PyG trains in two ways, with sampled neighbours and on the full graph, each with our loss and negatives and without the
batch's target edges. `--tune` tries as many configurations of each of the three sides for the same seconds, the sampled
peer's being ours; the best by validation MRR stand in BEST. The clock runs from the start of the command to the end of the
validation, on all sides: imports, loading and all validations count. `prepare`, once for all our runs, is counted apart,
and kernels have been compiled before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.cache import ROOT, peers_python
from benchmarks.footprint import horovodrun
from benchmarks.harness import OUT, child, finish
from horovod_trainer import console
from horovod_trainer.telemetry import METRICS_FILE, read_metrics

NAME = "time_to_quality"
CONFIG = "configs/pubmed-temporal.yaml"
LEAST = 0.30  # a peer below this validation MRR is no yardstick
RANKS = 2
# As many of each; the model, loss, kind of negatives and temperature are those that our own search found (docs/quality.md).
# A step of the full graph costs the same for any batch: small ones would only hold that peer up.
TRIED: dict[str, tuple[str, ...]] = {
    "ours": (
        "train.batch_size=64 negatives.count=256 model.dropout=0.1 optim.lr=2e-3 sampling.fanouts=[5,10] train.epochs=3",
        "train.batch_size=128 negatives.count=256 model.dropout=0.1 optim.lr=3e-3 sampling.fanouts=[5,10] train.epochs=4",
        "train.batch_size=256 negatives.count=512 model.dropout=0.1 optim.lr=3e-3 sampling.fanouts=[5,10] train.epochs=5",
        "ranks=1 train.batch_size=384 train.micro_batches=1 negatives.count=384 model.dropout=0 optim.lr=4e-3"
        " optim.warmup_steps=40 optim.average=0.98 sampling.fanouts=[3,10] train.epochs=3",
    ),
    "sampled": (
        "--batch 128 --pool 256 --dropout 0.1 --lr 0.002 --linear --fanouts 5 10 --epochs 3",
        "--batch 256 --pool 256 --dropout 0.1 --lr 0.003 --linear --fanouts 5 10 --epochs 4",
        "--batch 512 --pool 512 --dropout 0.1 --lr 0.003 --linear --fanouts 5 10 --epochs 5",
        "--batch 384 --pool 384 --dropout 0 --lr 0.004 --warmup 40 --linear --fanouts 3 10 --epochs 3",
    ),
    "full": (
        "--batch 1024 --pool 1024 --dropout 0.1 --lr 0.003 --linear --epochs 4",
        "--batch 2048 --pool 1024 --dropout 0.1 --lr 0.004 --linear --epochs 8",
        "--batch 1024 --pool 1024 --dropout 0 --lr 0.004 --warmup 40 --linear --epochs 4",
        "--batch 1536 --pool 1024 --dropout 0 --lr 0.005 --warmup 40 --linear --epochs 6",
    ),
}
BEST = {"ours": 3, "sampled": 3, "full": 2}  # numbers of TRIED, by validation MRR within the seconds of --tune
PEERS = ("sampled", "full")
Curve = list[dict[str, float]]  # validations: epoch, seconds, mrr


def main() -> None:
    """Run both peers once, the better one and us with every seed in turns, and say the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("DATA") or "../shared/data/pubmed-temporal")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="budget of one run, to the end of its last epoch")
    parser.add_argument("--tune", action="store_true", help="try every configuration of the peers instead")
    args = parser.parse_args()
    console.setup_logging(0)
    started = time.monotonic()
    store = prepare(args.data)
    prepare_seconds = time.monotonic() - started
    # compiles the kernels where this installation has not run before: `startup` says what that takes
    trainer("train", args.data, store, "train.max_steps=1", f"output.dir={OUT / NAME / 'first'}")
    if args.tune:
        tune(args, store)
        return
    chosen = {side: TRIED[side][number] for side, number in BEST.items()}
    curves: dict[str, list[Curve]] = {kind: [peer(args, kind, chosen[kind], 0)] for kind in PEERS}
    better = max(PEERS, key=lambda kind: best(curves[kind][0])["mrr"])
    curves["ours"] = [ours(args, store, chosen["ours"], 0)]
    for seed in range(1, args.seeds):
        curves[better].append(peer(args, better, chosen[better], seed))
        curves["ours"].append(ours(args, store, chosen["ours"], seed))
    target = statistics.median(best(curve)["mrr"] for curve in curves[better])
    if target < LEAST:
        sys.exit(f"the better peer, PyG {better}, reaches validation MRR {target:.4f}, below {LEAST}: no yardstick")
    result = summary(curves, better, prepare_seconds)
    finish(
        NAME, result, title=f"Seconds to validation MRR {target:.4f}, the best of PyG {better}", rows=table(curves, target),
        columns=["who", "seed", "best valid MRR", "its epoch", "seconds to its best", "seconds to the target"],
        details={"curves": curves, "tried": TRIED, "best": BEST}, draw=partial(draw, curves, target),
    )  # fmt: skip


def tune(args: argparse.Namespace, store: Path) -> None:
    """Give every configuration of all sides the same seconds; say the best of each by validation MRR."""
    found = {kind: [peer(args, kind, options, 0) for options in TRIED[kind]] for kind in PEERS}
    found["ours"] = [ours(args, store, options, 0) for options in TRIED["ours"]]
    rows = [
        [kind, options, best(curve)["mrr"], int(best(curve)["epoch"]), best(curve)["seconds"]]
        for kind, tried in TRIED.items()
        for options, curve in zip(tried, found[kind], strict=True)
    ]
    chosen = {kind: max(range(len(tried)), key=lambda i: best(tried[i])["mrr"]) for kind, tried in found.items()}
    finish(
        f"{NAME}_tune", chosen, title=f"Configurations, {args.seconds:.0f} s each", rows=rows,
        columns=["kind", "options", "best valid MRR", "its epoch", "seconds"], details={"curves": found},
        draw=partial(draw, found, LEAST),
    )  # fmt: skip


def peer(args: argparse.Namespace, kind: str, options: str, seed: int) -> Curve:
    """Train a peer with two threads and return its validations."""
    console.get_logger().info("PyG %s %s, seed %d", kind, options, seed)
    script = ROOT / "benchmarks" / "peers" / "quality.py"
    argv: list[str | Path] = [peers_python(), "-W", "ignore", script, "--data", args.data, "--kind", kind]
    argv += [*options.split(), "--seed", str(seed), "--threads", str(RANKS)]
    argv += ["--max-seconds", str(args.seconds), "--started", str(time.time())]
    curve: Curve = child(argv, cores=cores(), environment={"OMP_NUM_THREADS": str(RANKS)})["valid"]
    console.get_logger().info("best valid MRR %.4f after %.1f s", best(curve)["mrr"], best(curve)["seconds"])
    return curve


def ours(args: argparse.Namespace, store: Path, options: str, seed: int) -> Curve:
    """Train a configuration on `cores()`, two ranks of one each unless it says ranks=1, and return its validations."""
    console.get_logger().info("ours %s, seed %d", options, seed)
    out = OUT / NAME / f"ours-{seed}"
    shutil.rmtree(ROOT / out, ignore_errors=True)  # a run moves an earlier one aside: they would pile up
    hours = args.seconds / 3600
    words = options.split()
    ranks, *options_left = words if words[0].startswith("ranks=") else [f"ranks={RANKS}", *words]
    shape = [
        "optim.schedule=linear",
        "optim.warmup_steps=0",
        "optim.average=null",
        "evaluate.every=1",
        f"train.max_hours={hours}",
        *options_left,
    ]
    started = time.time()
    given = [*shape, f"train.seed={seed}", f"output.dir={out}"]
    trainer("train", args.data, store, *given, ranks=int(ranks.removeprefix("ranks=")))
    curve = validations(read_metrics(ROOT / out / METRICS_FILE), started)
    console.get_logger().info("best valid MRR %.4f after %.1f s", best(curve)["mrr"], best(curve)["seconds"])
    return curve


def prepare(data: str) -> Path:
    """Prepare the data from nothing and return the store's folder."""
    store = ROOT / OUT / NAME / "store"
    shutil.rmtree(store, ignore_errors=True)
    trainer("prepare", data, store)
    return store


def trainer(command: str, data: str, store: Path, *overrides: str, ranks: int = 1) -> None:
    """Run one of our commands on the cores, several ranks under horovodrun; its failure ends the benchmark."""
    settings = [word for item in (f"data.path={data}", f"data.store={store}", *overrides) for word in ("-s", item)]
    words = [command, *(["--resume", "never"] if command == "train" else []), "-c", CONFIG, *settings]
    argv = [sys.executable, "-m", "horovod_trainer", *words]
    if ranks > 1:
        argv = horovodrun(sys.executable, ranks, "horovod_trainer", words)
    pinned = ["taskset", "-c", ",".join(map(str, cores())), *argv]
    code = subprocess.run(pinned, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        sys.exit(f"{' '.join(pinned)}: exit code {code}")


def cores() -> list[int]:
    """Return the cores that both sides run on."""
    return sorted(os.sched_getaffinity(0))[:RANKS]


def validations(rows: Sequence[Mapping[str, Any]], started: float) -> Curve:
    """Return the validations among a run's metrics, in seconds since `started` (since 1970)."""
    return [
        {"epoch": row["epoch"], "seconds": row["time"] - started, "mrr": row["mrr"]}
        for row in rows
        if row["event"] == "valid"
    ]


def best(curve: Curve) -> dict[str, float]:
    """Return the first validation with the highest MRR."""
    return max(curve, key=lambda point: point["mrr"])


def reached(curve: Curve, target: float) -> float | None:
    """Return the seconds of the first validation at or above the target; None when there is none."""
    return next((point["seconds"] for point in curve if point["mrr"] >= target), None)


def summary(curves: Mapping[str, Sequence[Curve]], better: str, prepare_seconds: float) -> dict[str, Any]:
    """Return the ratio of median seconds: ours to the peer's median best MRR over the peer's to its own best.

    The ratio is None where half of our runs or more never get there.
    """
    target = statistics.median(best(curve)["mrr"] for curve in curves[better])
    theirs = statistics.median(best(curve)["seconds"] for curve in curves[better])
    times = sorted(float("inf") if (at := reached(curve, target)) is None else at for curve in curves["ours"])
    own = statistics.median(times)
    arrived = own < float("inf")
    return {
        "time_ratio_vs_pyg": round(own / theirs, 3) if arrived else None,
        "time_ratio_with_prepare": round((own + prepare_seconds) / theirs, 3) if arrived else None,
        "target_valid_mrr": round(target, 4),
        "peer": better,
        "peer_seconds": round(theirs, 1),
        "our_seconds": round(own, 1) if arrived else None,
        "prepare_seconds": round(prepare_seconds, 1),
        "our_best_valid_mrr": round(statistics.median(best(curve)["mrr"] for curve in curves["ours"]), 4),
        "runs_that_got_there": sum(at < float("inf") for at in times),
    }


def table(curves: Mapping[str, Sequence[Curve]], target: float) -> list[list[Any]]:
    """Return one row per run."""
    return [
        [
            who if who == "ours" else f"PyG {who}",
            seed,
            top["mrr"],
            int(top["epoch"]),
            top["seconds"],
            reached(one, target),
        ]
        for who, runs in curves.items()
        for seed, one in enumerate(runs)
        for top in [best(one)]
    ]


def draw(curves: Mapping[str, Sequence[Curve]], target: float, axes: Any) -> None:
    """Draw validation MRR over seconds, a colour per side."""
    for (who, runs), colour in zip(curves.items(), cycle(("C0", "C1", "C2")), strict=False):
        for number, curve in enumerate(runs):
            label = who if number == 0 else None
            axes.plot([p["seconds"] for p in curve], [p["mrr"] for p in curve], color=colour, marker=".", label=label)
    axes.axhline(target, color="grey", linestyle=":")
    axes.set_xlabel("seconds since the command was given")
    axes.set_ylabel("validation MRR")
    axes.legend()


if __name__ == "__main__":
    main()
