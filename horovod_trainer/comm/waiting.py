"""How a rank waits for a collective: asleep, and the longer the less often awake."""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod_trainer.comm.base import Communicator
from horovod_trainer.errors import CommunicationFailed

POLL_SECONDS = 1e-4  # between looks at a collective's end: a step's is as short as its latency
PATIENT_AFTER = 0.05  # seconds: what takes longer waits for a slower rank
PATIENT_POLL_SECONDS = 5e-3


def wait_for(done: Callable[[], bool]) -> None:
    """Return once done() says so.

    The libraries' own ways to wait are busy loops: they take the core from the sampler, from the library's threads, and
    from the very rank that is waited for where ranks share cores.
    """
    patience = time.monotonic() + PATIENT_AFTER
    while not done():
        time.sleep(POLL_SECONDS if time.monotonic() < patience else PATIENT_POLL_SECONDS)


def reason(failure: BaseException) -> str:
    """Return the first line of what a library says went wrong."""
    lines = str(failure).strip().splitlines()
    return lines[0].strip() if lines else type(failure).__name__


def collective_failed(comm: Communicator, failure: BaseException) -> CommunicationFailed:
    """Return a library's failure in a collective as ours, with the rank and host that saw it."""
    return CommunicationFailed(f"rank {comm.rank} on {comm.host}: a collective failed: {reason(failure)}")
