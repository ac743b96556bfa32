"""The wish to stop: SIGTERM and SIGUSR1 mean finish the step, commit a checkpoint, exit 75 (L0)."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from horovod_trainer.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # a pod's end; what mpirun passes on to its ranks, as it does not SIGTERM


class StopWish:
    """Listens for the signals while entered; the loop asks `asked` once a step, so that all ranks stop at one step.

    Before the loop has said `heed`, a signal raises Stopped where the main thread is: nothing is to be saved yet.
    """

    def __init__(self) -> None:
        self.asked = False
        self._heeded = False
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self._before = [(number, signal.signal(number, self._hear)) for number in SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def heed(self) -> None:
        """Say that from now on the loop looks at `asked`."""
        self._heeded = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._heeded:
            raise Stopped(
                f"asked to stop ({signal.Signals(number).name}) before the first step: nothing was to be saved"
            )
