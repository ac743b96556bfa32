"""The watchdog: a thread that ends a rank which makes no progress, with its stacks, instead of letting it hang (L0).

Horovod's own stall check runs in the thread that a dead link blocks, so it never fires there; this one needs nobody.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from horovod_trainer.errors import ExitCode

BACKSTOP_SECONDS = 3.0  # after our own end: C code that keeps Python's lock lets no Python thread run
REARM_SECONDS = 1.0  # arming the backstop starts a thread: not at every beat


class Watchdog:
    """Ends the process with code 124 once `seconds` have passed without a beat; suspended in phases that may take longer.

    farewell(sentence) is called first: it reports the sentence. describe() says where the rank is.
    """

    def __init__(self, seconds: float | None, farewell: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.describe: Callable[[], str] = lambda: "starting"
        self._farewell = farewell
        self._last = self._armed = time.monotonic()
        self._suspended = 0
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds is not None:
            self.beat()
            self._arm()
            threading.Thread(target=self._watch, args=(self.seconds,), name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self.seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, *_: object) -> None:
        """Say that there was progress; takes any arguments, so that it can be called wherever progress is reported."""
        self._last = time.monotonic()
        if self._last - self._armed > REARM_SECONDS:
            self._arm()

    def counting(self, progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
        """Return `progress`, every report of which is a beat."""

        def report(stage: str, done: int, total: int) -> None:
            self.beat()
            progress(stage, done, total)

        return report

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not count the time inside `with`: a phase that others bound, and that may take longer."""
        self._suspended += 1
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self._suspended -= 1
            self.beat()
            self._arm()

    def _arm(self) -> None:
        self._armed = time.monotonic()
        if self.seconds is not None and not self._suspended and not self._stop.is_set():
            faulthandler.dump_traceback_later(self.seconds + BACKSTOP_SECONDS, exit=True, file=_stderr())

    def _watch(self, seconds: float) -> None:
        while not self._stop.wait(min(1.0, seconds / 10)):
            if self._suspended or time.monotonic() - self._last < seconds:
                continue
            self._farewell(
                f"no progress for {seconds:g} s (train.watchdog_s), {self.describe()}: another rank or the network is "
                "gone, or this rank hangs; the stacks of all threads are below"
            )
            faulthandler.dump_traceback(_stderr(), all_threads=True)
            os._exit(ExitCode.TIMEOUT)


def _stderr() -> int:
    """Return the descriptor of standard error: a stream that a test or a live bar put in its place has none."""
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
