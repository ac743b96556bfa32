"""One rank of the measured evaluation: the test split of the big store, scored by an untrained model of the given decoder.

Started by horovodrun. Rank 0 writes to --out a JSON object: the metrics and the seconds of every stage.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from horovod_trainer.allocator import restart_tuned


def main() -> None:
    """Open, build, embed, score; clock each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    restart_tuned()  # as the command line does
    began = time.monotonic()
    from horovod_trainer import console
    from horovod_trainer.assemble import build_evaluator, build_model
    from horovod_trainer.cli import set_threads
    from horovod_trainer.comm.backends import open_communicator
    from horovod_trainer.config import load_config
    from horovod_trainer.data.store import open_store
    from horovod_trainer.launchers import launcher_rank

    console.setup_logging(launcher_rank())
    config = load_config([Path(args.config)], args.set)
    store = open_store(Path(config.data.store))
    comm = open_communicator("horovod")
    evaluator = build_evaluator(config, store, comm, set_threads(config, comm), "test")
    model = build_model(config, evaluator.features.width)
    marks = [time.monotonic()]
    layers = config.model.layers

    def progress(stage: str, done: int, total: int) -> None:
        if done >= total * len(marks) // layers:
            marks.append(time.monotonic())
        console.stage_progress(stage, done, total)

    result = evaluator.run(model, store.held_out("test"), progress=progress)
    ended = time.monotonic()
    if comm.rank == 0:
        seconds = {"start": marks[0] - began}
        seconds |= {f"layer {n}": marks[n] - marks[n - 1] for n in range(1, layers + 1)}
        seconds |= {"scores": ended - marks[layers]}
        Path(args.out).write_text(json.dumps({"metrics": result, "seconds": seconds}))
    comm.close()


if __name__ == "__main__":
    main()
