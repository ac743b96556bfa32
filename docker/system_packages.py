"""The Debian/Ubuntu packages a build needs: which are missing, the command that installs them, and its use as root."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docker.commands import run_logged
from horovod_trainer.errors import NotFound


@dataclass(frozen=True)
class Requirement:
    """One thing the system must have: how to see it and the packages that bring it."""

    name: str
    packages: tuple[str, ...]
    present: Callable[[], bool]


def requirements() -> list[Requirement]:
    """Return all that the virtual environment and the Horovod build need, for the Python that runs this."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [
        Requirement("venv", (f"{python}-venv",), lambda: importlib.util.find_spec("ensurepip") is not None),
        Requirement("Python.h", (f"{python}-dev",), lambda: Path(sysconfig.get_path("include"), "Python.h").is_file()),
        Requirement("g++", ("g++",), lambda: shutil.which("g++") is not None),
        Requirement("make", ("make",), lambda: shutil.which("make") is not None),
        Requirement("patch", ("patch",), lambda: shutil.which("patch") is not None),
        # Open MPI 4.1 is what Debian and Ubuntu ship; libc6-dev comes with g++.
        Requirement("mpirun", ("openmpi-bin",), lambda: shutil.which("mpirun") is not None),
        Requirement("mpicxx", ("libopenmpi-dev",), lambda: shutil.which("mpicxx") is not None),
    ]


def install_command(missing: list[Requirement]) -> list[str]:
    """Return the exact apt-get command that brings what is missing."""
    packages = [package for requirement in missing for package in requirement.packages]
    return ["apt-get", "install", "-y", "--no-install-recommends", *packages]


def ensure(log: Path) -> None:
    """See that everything is there, installing it when this is root on a system with apt; raise NotFound otherwise."""
    missing = _missing()
    if not missing:
        return
    command = install_command(missing)
    names = ", ".join(requirement.name for requirement in missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise NotFound(f"the system lacks {names}; on Debian or Ubuntu: {sudo}{' '.join(command)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run_logged("apt-get update", ["apt-get", "update"], log, env)
    run_logged(f"apt-get install: {' '.join(command[4:])}", command, log, env)
    if still := _missing():
        raise NotFound(
            f"still missing after {' '.join(command)}: {', '.join(requirement.name for requirement in still)}"
        )


def _missing() -> list[Requirement]:
    # A package that has just been installed is not yet in the finder's cache of folders.
    importlib.invalidate_caches()
    return [requirement for requirement in requirements() if not requirement.present()]
