"""How this product compiles its kernels: the only place that decorates with numba, which has no types."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def _cache_folder() -> str:
    """Return the kernel cache of this very source: numba itself would not notice a change in an inlined helper's file."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "horovod-trainer", "numba"
    )
    return os.path.join(base, digest)


numba.config.CACHE_DIR = _cache_folder()


def compiled(function: F) -> F:
    """Compile to a serial kernel that releases the GIL; safe in any thread; cached on disk."""
    return cast(F, numba.njit(nogil=True, cache=True)(function))


def parallel(function: F) -> F:
    """Compile to a kernel over `prange`; only ever called from the main thread (numba's workqueue is not re-entrant)."""
    return cast(F, numba.njit(nogil=True, cache=True, parallel=True)(function))


def inlined(function: F) -> F:
    """Compile a small function for use inside other kernels."""
    return cast(F, numba.njit(nogil=True, inline="always")(function))


def set_threads(count: int) -> None:
    """Let parallel kernels use at most `count` threads (numba never exceeds what it started with)."""
    numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))
