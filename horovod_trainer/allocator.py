"""What glibc's allocator is told, so that a step finds the memory of the step before (L0: standard library only).

By default every block above 32 MiB is mapped anew and given back at once: each step then pays for zeroed pages, which
took a third of its time (docs/performance.md has the figures). The settings are read when a process starts, so the
process starts once more with them, before anything heavy is loaded: the same process to its launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

TUNABLES = {
    "glibc.malloc.mmap_max": "0",  # large blocks come from the heap
    "glibc.malloc.trim_threshold": str(1 << 40),  # which is not given back between steps
    "glibc.malloc.top_pad": str(16 << 20),  # and grows in steps worth the call
    "glibc.malloc.arena_max": "1",  # one heap: what the sampler's thread frees, the backward uses
    "glibc.malloc.hugetlb": "1",  # with huge pages, where the kernel gives them to those who ask
}
SWITCH = "HOROVOD_TRAINER_MALLOC"  # `system` leaves the allocator alone


def tuned(environment: Mapping[str, str]) -> str | None:
    """Return GLIBC_TUNABLES with ours added where the user set no other value; None when there is nothing to add."""
    given = [entry for entry in environment.get("GLIBC_TUNABLES", "").split(":") if entry]
    names = {entry.split("=", 1)[0] for entry in given}
    added = [f"{name}={value}" for name, value in TUNABLES.items() if name not in names]
    return ":".join(given + added) if added else None


def restart_tuned(argv: Sequence[str] | None = None) -> None:
    """Replace this process by itself with tuned settings; does nothing where they are set, switched off or not glibc's."""
    if os.environ.get(SWITCH) == "system" or not _is_glibc():
        return
    settings = tuned(os.environ)
    if settings is None or not sys.executable:
        return
    words = list(sys.orig_argv if argv is None else argv)
    os.execve(sys.executable, [sys.executable, *words[1:]], {**os.environ, "GLIBC_TUNABLES": settings})


def _is_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):  # another C library knows no such name
        return False
