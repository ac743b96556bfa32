"""Seed edges per second on one core, against PyG on the same arrays: 2 and 3 layers, hidden 256, 1,024 seed edges a step.

Every variant that PyG offers is tried first; the quickest at each shape, and one that we assembled from PyG's parts and
that is quicker still (`ratio_vs_assembled_*`), then take turns with us. `ratio_vs_pyg_*` has our defaults: the stored first
hop, one negative each. `ratio_same_math_*` samples every hop as PyG does. Our step takes the micro-batch's
target edges out of message passing, PyG's does not: the difference in work is to our disadvantage.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cache import BIG_CONFIG, ROOT, big_store, peers_python
from benchmarks.harness import child, finish, median, paired
from horovod_trainer import allocator, console

SHAPES = {"2_layers": (15, 10), "3_layers": (15, 10, 5)}
# The loaders embed every node of the sampled subgraph at every layer: 5 to 10 times slower at 2 layers, minutes a step at 3.
VARIANTS = {
    "2_layers": ("layered", "trimmed", "link_loader", "link_loader_sparse"),
    "3_layers": ("layered", "trimmed"),
}
STOCK = ("layered", "link_loader", "link_loader_sparse")  # what PyG offers its users
ASSEMBLED = "trimmed"  # put together by us from PyG's and torch-sparse's parts: quicker than anything PyG offers
SAME_MATH = ("sampling.first_hop=sampled", "negatives.kind=uniform", "negatives.count=1")
BUSY = 0.95  # of a step's wall-clock time the process should hold the core
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
OUR_PHASES = {"sample and gather": ("wait",), "forward": ("forward", "count"), "backward": ("backward",)}
PEER_PHASES = {"sample and gather": ("sample", "gather"), "forward": ("forward",), "backward": ("backward",)}


def main() -> None:
    """Try PyG's variants, run the pairs, say the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, for our default runs")
    parser.add_argument("--turns", type=int, default=7, help="of 2 layers; half as many of 3, which take minutes each")
    args = parser.parse_args()
    console.setup_logging(0)
    tried = scout()
    best = {shape: quickest(tried, shape, STOCK) for shape in SHAPES}
    tuned = peer("2_layers", best["2_layers"], 1, 3, own_allocator=True)
    runs: dict[str, list[dict[str, Any]]] = {}
    for shape in SHAPES:
        slow = len(SHAPES[shape]) > 2
        sides = {
            f"{shape} ours": partial(ours, shape, args.set, 8 if slow else 24),
            f"{shape} pyg": partial(peer, shape, best[shape], 1, 1 if slow else 4),
            f"{shape} same_math": partial(ours, shape, [*args.set, *SAME_MATH], 4 if slow else 12),
        }
        sides[f"{shape} assembled"] = partial(peer, shape, ASSEMBLED, 1, 1 if slow else 4)
        runs |= paired(-(-args.turns // 2) if slow else args.turns, sides)
    say_contention(runs)
    rows = table(tried, tuned, best, runs)
    finish(
        "throughput", summary(runs, best), title="Seed edges per second on one core", rows=rows,
        columns=["shape", "who", "edges/s", "s/step", "sample and gather", "forward", "backward", "floor s/step"],
        details={"variants": tried, "with_our_allocator": tuned, "runs": runs}, draw=partial(draw, runs),
    )  # fmt: skip


def scout() -> dict[str, dict[str, dict[str, Any]]]:
    """Return one short run of every variant of PyG at every shape."""
    tried: dict[str, dict[str, dict[str, Any]]] = {}
    for shape, variants in VARIANTS.items():
        tried[shape] = {}
        for variant in variants:
            tried[shape][variant] = answer = peer(shape, variant, 1, 1 if len(SHAPES[shape]) > 2 else 2)
            console.get_logger().info("%s, PyG %s: %.1f edges/s", shape, variant, answer["edges_per_second"])
    return tried


def seconds(answer: Mapping[str, Any]) -> float:
    """Return the seconds of a run's step."""
    return float(answer["seconds_per_step"])


def quickest(tried: Mapping[str, Mapping[str, Mapping[str, Any]]], shape: str, among: Sequence[str]) -> str:
    """Return the variant with the least seconds a step at a shape."""
    found = tried[shape]
    return min((variant for variant in among if variant in found), key=lambda variant: seconds(found[variant]))


def peer(shape: str, variant: str, warmup: int, steps: int, own_allocator: bool = False) -> dict[str, Any]:
    """Take PyG's steps on the core; own_allocator: with what our trainer tells glibc, which PyG's users do not have."""
    settings = allocator.tuned(os.environ) if own_allocator else None
    argv: list[str | Path] = [
        peers_python(),
        "-W",
        "ignore",
        ROOT / "benchmarks" / "peers" / "throughput.py",
        "--store",
        big_store(),
    ]
    argv += ["--variant", variant, "--fanouts", *map(str, SHAPES[shape])]
    argv += ["--warmup", str(warmup), "--steps", str(steps)]
    environment = ONE_THREAD | ({"GLIBC_TUNABLES": settings} if settings else {})
    return child(argv, cores=core(), environment=environment)


def ours(shape: str, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Take our steps on the same core."""
    fanouts = SHAPES[shape]
    chosen = [f"data.store={big_store()}", f"model.layers={len(fanouts)}", f"sampling.fanouts={list(fanouts)}"]
    argv: list[str | Path] = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.ours_throughput",
        "--config",
        BIG_CONFIG,
    ]
    argv += ["--steps", str(steps), *(word for item in (*chosen, *overrides) for word in ("--set", item))]
    return child(argv, cores=core(), environment=ONE_THREAD)


def say_contention(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Warn where steps waited for the core: the machine was not ours alone, and the rates are too low."""
    for side, answers in runs.items():
        share = median(answers, "cpu_seconds_per_step") / median(answers, "seconds_per_step")
        if share < BUSY:
            console.get_logger().warning("%s: the core was ours for %.0f %% of the time only", side, 100 * share)


def core() -> list[int]:
    """Return the one core of all runs: the last, as interrupts tend to go to the first."""
    return [max(os.sched_getaffinity(0))]


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]], best: Mapping[str, str]) -> dict[str, Any]:
    """Return the medians over turns of the turns' ratios, the rates, and the floor beside a step's actual seconds."""
    result: dict[str, Any] = {}

    def rate(side: str) -> float:
        return median(runs[side], "edges_per_second")

    def ratio(side: str, other: str) -> float:
        pairs = zip(runs[side], runs[other], strict=True)
        return round(float(statistics.median(a["edges_per_second"] / b["edges_per_second"] for a, b in pairs)), 2)

    for shape in best:
        mark = "" if shape == "2_layers" else "_3"
        result[f"ratio_vs_pyg_{shape}"] = ratio(f"{shape} ours", f"{shape} pyg")
        result[f"ratio_vs_assembled_{shape}"] = ratio(f"{shape} ours", f"{shape} assembled")
        result[f"ratio_same_math{mark}"] = ratio(f"{shape} same_math", f"{shape} pyg")
    for shape, variant in best.items():
        result[f"pyg_variant_{shape}"] = variant
        result[f"edges_per_second_{shape}"] = {
            side.removeprefix(f"{shape} "): round(rate(side), 1) for side in runs if side.startswith(shape)
        }
        for key in ("floor_seconds", "seconds_per_step"):
            result[f"{key}_{shape}"] = round(median(runs[f"{shape} ours"], key), 4)
    return result


def table(
    tried: Mapping[str, Mapping[str, Mapping[str, Any]]],
    tuned: Mapping[str, Any],
    best: Mapping[str, str],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[list[Any]]:
    """Return one row per side and shape, then the single runs: the other variants, and PyG with our allocator settings."""
    rows = []
    for side, answers in runs.items():
        shape, who = side.split(" ", 1)
        name = {"ours": "ours", "same_math": "ours, no precompute"}.get(who, f"PyG {answers[0].get('variant')}")
        phases = _phases(answers)
        floor = median(answers, "floor_seconds") if "floor_seconds" in answers[0] else None
        figures = [median(answers, "edges_per_second"), median(answers, "seconds_per_step")]
        rows.append([shape.replace("_", " "), name, *figures, *phases, floor])
    singles = [(shape, f"PyG {name}, once", run) for shape, found in tried.items() for name, run in found.items()]
    singles.append(("2_layers", f"PyG {best['2_layers']} with our allocator settings, once", tuned))
    for shape, name, run in singles:
        rows.append([shape.replace("_", " "), name, run["edges_per_second"], seconds(run), *_phases([run]), None])
    return rows


def _phases(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the median seconds of the phases that both sides have; ours are of steps that sample in turn."""
    names = PEER_PHASES if "variant" in answers[0] else OUR_PHASES
    flat = [
        {name: sum(answer["phases"].get(part, 0.0) for part in parts) for name, parts in names.items()}
        for answer in answers
    ]
    return [median(flat, name) for name in names]


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], axes: Any) -> None:
    """Draw a bar per side."""
    sides = list(runs)
    axes.barh(sides, [median(runs[side], "edges_per_second") for side in sides])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seed edges per second on one core")


if __name__ == "__main__":
    main()
