"""One rank of the allreduce measurement: the trainer's own communicator, several sizes, from the last rank's call on.

Started by horovodrun. Rank 0 writes to --out a JSON object: median seconds per size, and the bytes that crossed loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rank_steps import pin

if TYPE_CHECKING:
    from horovod_trainer.comm.base import Communicator

SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24))  # bytes; the gradients here are about 2^20
REPEATS = 41  # of each; the median counts
STRIDE = 0.37e-3  # seconds: calls fall anywhere in Horovod's cycle, as those of training do
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", required=True, help="comma-separated; rank r runs on number r, round and round")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pin(args.cores, int(os.environ["HOROVOD_LOCAL_RANK"]))
    from horovod_trainer.comm.horovod_backend import HorovodCommunicator

    comm = HorovodCommunicator()
    seconds, sent = {}, {}
    for size in SIZES:
        measure(comm, size, 3)  # the first calls negotiate and grow buffers
        before = int(LOOPBACK.read_text())
        seconds[size] = measure(comm, size, REPEATS)
        sent[size] = (int(LOOPBACK.read_text()) - before) / REPEATS
    if comm.rank == 0:
        args.out.write_text(json.dumps({"ranks": comm.size, "seconds": seconds, "loopback_bytes": sent}))
    comm.close()


def measure(comm: Communicator, size: int, repeats: int) -> float:
    """Return the median seconds from the last rank's call to this rank's return."""
    import torch

    tensor = torch.ones(size // 4)
    began, ended = [], []
    for number in range(repeats):
        time.sleep(STRIDE * (number % 8))
        began.append(time.monotonic())
        comm.allreduce_(tensor, "max")  # leaves the ones as they are
        ended.append(time.monotonic())
    everyone = torch.stack(comm.allgather(torch.tensor([began], dtype=torch.float64)))
    last = everyone.amax(0)[0].tolist()
    return float(statistics.median(end - begin for begin, end in zip(last, ended, strict=True)))


if __name__ == "__main__":
    main()
