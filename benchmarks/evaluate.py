"""Evaluation at ogbl-citation2's size: 2 ranks, every node embedded by 3 layers, 86,596 x 1,001 scores, to the metrics.

Against PyG's layer-wise inference and OGB's scoring loop on the same arrays, of which a sample is timed and extrapolated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cache import BIG_CONFIG, ROOT, big_store, peers_python
from benchmarks.footprint import Watch, horovodrun
from benchmarks.harness import child, finish
from horovod_trainer import console

RANKS = 2
DECODERS = ("dot", "mlp")
MODEL = {
    "model.layers": 3,
    "sampling.fanouts": [15, 10, 5],
    "evaluate.valid_queries": "null",
}  # as configs/citation2.yaml
MODULE = "benchmarks.rank_evaluate"


def main() -> None:
    """Measure both decoders and the peer, one after the other: each takes all cores."""
    console.setup_logging(0)
    store = big_store()
    ours = {decoder: evaluate(store, decoder) for decoder in DECODERS}
    peer = child([peers_python(), ROOT / "benchmarks" / "peers" / "inference.py", "--store", store])
    minutes = {decoder: run["wall"] / 60 for decoder, run in ours.items()}
    peers = {decoder: (peer["embed_seconds"] + peer[f"{decoder}_seconds"]) / 60 for decoder in DECODERS}
    summary = {
        "minutes": round(minutes["dot"], 2),
        "minutes_mlp": round(minutes["mlp"], 2),
        "pss_gib": round(max(run["pss_gib"] for run in ours.values()), 2),
        "ratio_vs_pyg_inference_extrapolated": round(peers["dot"] / minutes["dot"], 1),
        "ratio_vs_pyg_inference_extrapolated_mlp": round(peers["mlp"] / minutes["mlp"], 1),
    }
    stages = list(ours["dot"]["seconds"])
    rows: list[list[Any]] = [
        [f"{stage} [s]", ours["dot"]["seconds"][stage], ours["mlp"]["seconds"][stage], None] for stage in stages
    ]
    rows += [
        ["whole command [min]", minutes["dot"], minutes["mlp"], None],
        ["PyG, dot, extrapolated [min]", None, None, peers["dot"]],
        ["PyG, MLP, extrapolated [min]", None, None, peers["mlp"]],
        ["PSS of both ranks, peak [GiB]", ours["dot"]["pss_gib"], ours["mlp"]["pss_gib"], peer["peak_gib"]],
        ["largest USS of a rank [GiB]", ours["dot"]["uss_gib"], ours["mlp"]["uss_gib"], None],
    ]

    def draw(axes: Any) -> None:
        left = [0.0] * len(DECODERS)
        for stage in stages:
            seconds = [ours[decoder]["seconds"][stage] for decoder in DECODERS]
            axes.barh(DECODERS, seconds, left=left, label=stage)
            left = [a + b for a, b in zip(left, seconds, strict=True)]
        axes.set_xlabel("seconds")
        axes.legend()

    finish(
        "evaluate", summary, title=f"Evaluation at citation2's size, {RANKS} ranks on this machine",
        columns=["", "dot", "mlp", "PyG, 1 process"], rows=rows, details={"ours": ours, "peer": peer}, draw=draw,
    )  # fmt: skip


def evaluate(store: Path, decoder: str) -> dict[str, Any]:
    """Run the evaluation once; return its stages' seconds, the command's wall-clock seconds and the memory's peak."""
    settings = {**MODEL, "data.store": store, "model.decoder": decoder}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        arguments = ["--config", str(BIG_CONFIG), "--out", str(out)]
        arguments += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        started = time.monotonic()
        job = subprocess.Popen(horovodrun(sys.executable, RANKS, MODULE, arguments), cwd=ROOT, stdout=sys.stderr)
        with Watch(job, MODULE) as watch:
            code = job.wait()
            wall = time.monotonic() - started
        if code:
            sys.exit(f"the evaluation with decoder {decoder} failed with exit code {code}")
        measured: dict[str, Any] = json.loads(out.read_text())
    memory = {"pss_gib": watch.pss / 1024, "uss_gib": watch.uss / 1024, "readings": watch.readings}
    console.get_logger().info("%s: %.1f s, %.2f GiB", decoder, wall, memory["pss_gib"])
    return {**measured, **memory, "wall": wall}


if __name__ == "__main__":
    main()
