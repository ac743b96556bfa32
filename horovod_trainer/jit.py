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
    texts = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    kernels = [text for text in texts if b"horovod_trainer.jit import" in text or b"numba" in text]
    digest = hashlib.sha256(b"".join(kernels)).hexdigest()[:16]
    base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "horovod-trainer", "numba"
    )
    return os.path.join(base, digest)


def _is_writable(folder: str) -> bool:
    """Return whether kernels can be kept there; a container's user often has no home."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


SETTINGS: Any = numba.config  # its names are made at run time, unknown to type checkers
SETTINGS.CACHE_DIR = _cache_folder()
CACHED = _is_writable(SETTINGS.CACHE_DIR)  # otherwise numba raises at import; without it every process compiles anew


def compiled_before(kernel: str) -> bool:
    """Return whether the cache holds the kernel's machine code."""
    return CACHED and any(Path(SETTINGS.CACHE_DIR).rglob(f"*.{kernel}-*.nbi"))


def compiled(function: F) -> F:
    """Compile to a serial kernel that releases the GIL; safe in any thread; cached on disk where that can be written."""
    return cast(F, numba.njit(nogil=True, cache=CACHED)(function))


def parallel(function: F) -> F:
    """Compile to a kernel over `prange`; only ever called from the main thread (numba's workqueue is not re-entrant)."""
    return cast(F, numba.njit(nogil=True, cache=CACHED, parallel=True)(function))


def reassociated(function: F) -> F:
    """Compile like `compiled`, and let sums be reordered into vector lanes: the same order on every call."""
    return cast(F, numba.njit(nogil=True, cache=CACHED, fastmath={"reassoc", "contract"})(function))


def inlined(function: F) -> F:
    """Compile a small function for use inside other kernels."""
    return cast(F, numba.njit(nogil=True, inline="always")(function))


def set_threads(count: int) -> None:
    """Let parallel kernels use at most `count` threads (numba never exceeds what it started with)."""
    numba.set_num_threads(max(1, min(count, SETTINGS.NUMBA_NUM_THREADS)))
