"""The `prepare` command on OGB's files with the clock on every stage; the last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import time

from horovod_trainer import console
from horovod_trainer.config import DataSection
from horovod_trainer.data.prepare import prepare_store
from horovod_trainer.data.store import read_manifest


class Stages:
    """Takes progress; seconds and core_seconds: stage -> time since the stage before it was last heard of."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.core_seconds: dict[str, float] = {}
        self._last, self._last_core = time.perf_counter(), time.process_time()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note the time that has gone by for this stage."""
        now, core = time.perf_counter(), time.process_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self.core_seconds[stage] = self.core_seconds.get(stage, 0.0) + core - self._last_core
        self._last, self._last_core = now, core
        console.stage_progress(stage, done, total)


def main() -> None:
    """Prepare the store and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", help="root of the files")
    parser.add_argument("store", help="folder for the store")
    args = parser.parse_args()
    console.setup_logging(0)
    stages = Stages()
    config = DataSection(source="ogb", name="ogbl-citation2", path=args.csv, store=args.store)
    manifest = read_manifest(prepare_store(config, stages))
    counts = manifest["counts"]
    files = sum(entry["bytes"] for entry in manifest["arrays"].values())
    print(
        json.dumps(
            {
                "seconds": {stage: round(seconds, 2) for stage, seconds in stages.seconds.items()},
                "core_seconds": {stage: round(seconds, 2) for stage, seconds in stages.core_seconds.items()},
                "nodes": counts["nodes"], "edges": counts["train_edges"], "graph_edges": counts["graph_edges"],
                "store_gib": files / 2**30, "digest": manifest["digest"],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
