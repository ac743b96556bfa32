"""Train a data set with several seeds under horovodrun; print each run, then one JSON object with the mean figures.

`make quality DATA=...`: DATA is a folder with the two files of source npz and its own split.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Prepare once, train once per seed, print the summary as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the npz files")
    parser.add_argument("--config", default="configs/pubmed-temporal.yaml")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0, help="training budget of one seed")
    parser.add_argument("--out", default="runs/quality")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, for all runs")
    args = parser.parse_args()
    budget = f"train.max_hours={args.minutes / 60}"
    common = [
        "-c",
        args.config,
        "-s",
        f"data.path={args.data}",
        "-s",
        budget,
        *(word for item in args.set for word in ("-s", item)),
    ]
    run([sys.executable, "-m", "horovod_trainer", "prepare", *common])
    results = [train(common, args.num_proc, seed, Path(args.out) / f"seed-{seed}") for seed in range(args.seeds)]
    print(json.dumps(summary(results)))


def train(common: list[str], ranks: int, seed: int, out: Path) -> dict[str, Any]:
    """Run one seed and return its result.json with the wall-clock seconds of the whole command."""
    started = time.monotonic()
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(ranks)]
    own = ["-s", f"train.seed={seed}", "-s", f"output.dir={out}"]
    run([*horovodrun, sys.executable, "-m", "horovod_trainer", "train", "--resume", "never", *common, *own])
    result: dict[str, Any] = json.loads((ROOT / out / "result.json").read_text())
    result["wall_seconds"] = time.monotonic() - started
    print(f"seed {seed}: test MRR {result['test']['mrr']:.4f}, {result['wall_seconds']:.0f} s", flush=True)
    return result


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return means over seeds, the unbiased deviation of the test MRR, and the seconds of whole commands."""
    test = [result["test"]["mrr"] for result in results]
    return {
        "test_mrr_mean": round(statistics.mean(test), 4),
        "test_mrr_std": round(statistics.stdev(test), 4) if len(test) > 1 else 0.0,
        "valid_mrr_mean": round(statistics.mean(result["valid"]["mrr"] for result in results), 4),
        "seconds_mean": round(statistics.mean(result["wall_seconds"] for result in results), 1),
        "seeds": len(results),
    }


def run(command: list[str]) -> None:
    """Run a command from the project's root; its failure ends the benchmark with its exit code."""
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
