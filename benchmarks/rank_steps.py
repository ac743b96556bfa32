"""One rank of a measured training job, on a core of its own; the times of every step's allreduce go to a file as it runs.

Under horovodrun it trains with Horovod. With --alone RANK it does the very micro-batches of that rank of --size ranks
without any communication: what the rank could do by itself. With --score it also validates, and scores the test split at
the end; without, it takes steps until the job is ended. --out is a folder for OUT/RANK.json (who I am, written when the
first step may begin), OUT/RANK.clock (two float64 per step: allreduce began, ended) and OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from horovod_trainer.comm.base import Communicator, Reduction
    from horovod_trainer.data.store import Store
    from horovod_trainer.train import Trainer


def main() -> None:
    """Train as told."""
    from horovod_trainer.allocator import restart_tuned

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--cores", required=True, help="comma-separated; rank r runs on number r, round and round")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--alone", type=int, help="be this rank of --size, without communication")
    parser.add_argument("--size", type=int, default=1)
    args = parser.parse_args()
    restart_tuned()  # as the command line does
    pin(args.cores, int(os.environ.get("HOROVOD_LOCAL_RANK", 0)) if args.alone is None else args.alone)
    train(args)


def pin(cores: str, rank: int) -> None:
    """Bind this process and its future threads to one of the cores; ranks beyond their number share them in turn."""
    numbers = [int(core) for core in cores.split(",")]
    os.sched_setaffinity(0, {numbers[rank % len(numbers)]})


def clocked(communicator: type[Any], file: Path) -> type[Any]:
    """Return a subclass that writes when every allreduce began and ended: seconds of the clock all processes here share."""
    import numpy as np

    class Clocked(communicator):  # type: ignore[misc]  # the base is only known when it runs
        def allreduce_(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
            began = time.monotonic()
            super().allreduce_(tensor, op)
            with file.open("ab") as clock:
                clock.write(np.array([began, time.monotonic()]).tobytes())
            return tensor

    return Clocked


def communicator(args: argparse.Namespace) -> Communicator:
    """Return the clocked communicator: Horovod's, or that of a rank by itself."""
    from horovod_trainer.comm.base import Solo
    from horovod_trainer.comm.horovod_backend import HorovodCommunicator

    rank = args.alone if args.alone is not None else int(os.environ["HOROVOD_RANK"])
    clock = args.out / f"{rank}.clock"
    if args.alone is None:
        comm: Communicator = clocked(HorovodCommunicator, clock)()
        return comm
    alone: Communicator = clocked(Solo, clock)()
    alone.rank, alone.size = args.alone, args.size  # its share of every step, and nobody to talk to
    return alone


def train(args: argparse.Namespace) -> None:
    """Train until the job is ended, or to the end with scores."""
    from horovod_trainer import console
    from horovod_trainer.cli import set_threads
    from horovod_trainer.config import load_config
    from horovod_trainer.data.store import open_store
    from horovod_trainer.launchers import launcher_rank

    console.setup_logging(launcher_rank())
    settings = load_config([args.config], args.set)
    store = open_store(Path(settings.data.store))
    comm = communicator(args)
    threads = set_threads(settings, comm)
    from horovod_trainer.telemetry import Telemetry
    from horovod_trainer.train import Trainer

    trainer = Trainer(settings, store, comm, threads)
    about = {"pid": os.getpid(), "bytes": trainer.flat.buffer.nbytes, "batch_size": settings.train.batch_size}
    file = args.out / f"{comm.rank}.json"
    file.with_suffix(".new").write_text(json.dumps(about))
    file.with_suffix(".new").rename(file)
    metrics = Telemetry(args.out, comm.rank if args.alone is None else 0, {}, tensorboard=False)
    result = trainer.run(metrics)  # only comes back where an end was asked for
    if args.score:
        result["accuracy"] = balanced_accuracy(trainer, store, comm)
    if comm.rank == 0:
        (args.out / "result.json").write_text(json.dumps(result))
    comm.close()


def balanced_accuracy(trainer: Trainer, store: Store, comm: Communicator) -> float:
    """Return the test accuracy at probability 0.5 on balanced pairs: every citation, and its first stored negative."""
    import numpy as np

    from horovod_trainer.assemble import build_evaluator
    from horovod_trainer.evaluate import candidates, score_candidates
    from horovod_trainer.inference import embed

    held_out = store.held_out("test")
    if held_out.negatives is None:
        raise SystemExit("accuracy needs held-out citations with negatives of their own")
    evaluator = build_evaluator(trainer.config, store, comm, trainer.threads, "test")
    h = embed(
        trainer.model.eval().encoder, evaluator.graph, evaluator.features, comm,
        stored_first_hop=evaluator.stored_first_hop, node_block=evaluator.config.node_block, threads=trainer.threads,
    )  # fmt: skip
    edge = np.asarray(held_out.edge)
    scores = score_candidates(trainer.model, h, edge[:, 0], candidates(edge[:, 1], held_out.negatives[:, :1]))
    return float(0.5 * ((scores[:, 0] > 0).mean() + (scores[:, 1] <= 0).mean()))


if __name__ == "__main__":
    main()
