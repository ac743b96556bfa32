"""The allocator's settings: added once, never over the user's, and read by the process that trains."""

from __future__ import annotations

import os
import subprocess
import sys

from horovod_trainer.allocator import SWITCH, TUNABLES, tuned

SHOW = (
    "import os, sys; from horovod_trainer.allocator import restart_tuned; before = os.getpid(); restart_tuned();"
    "print(os.getpid(), sys.argv[1:], os.environ.get('GLIBC_TUNABLES'))"
)


def started(**environment: str) -> tuple[str, int]:
    base = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", SWITCH)}
    child = subprocess.Popen(
        [sys.executable, "-c", SHOW, "a b", "ü"], env=base | environment, stdout=subprocess.PIPE, text=True
    )
    out = child.communicate()[0]
    assert child.returncode == 0
    return out.strip(), child.pid


def test_ours_are_added_and_the_users_stay() -> None:
    assert tuned({}) == ":".join(f"{name}={value}" for name, value in TUNABLES.items())
    mixed = tuned({"GLIBC_TUNABLES": "glibc.malloc.arena_max=8:glibc.cpu.x=1"})
    assert mixed is not None
    assert mixed.startswith("glibc.malloc.arena_max=8:glibc.cpu.x=1:")
    assert mixed.count("arena_max") == 1
    assert tuned({"GLIBC_TUNABLES": mixed}) is None


def test_a_process_starts_again_as_itself_with_its_arguments() -> None:
    out, pid = started()
    assert out == f"{pid} ['a b', 'ü'] {tuned({})}"


def test_it_can_be_switched_off() -> None:
    out, pid = started(**{SWITCH: "system"})
    assert out == f"{pid} ['a b', 'ü'] None"
