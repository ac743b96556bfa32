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

from docker.commands import run_logged, say
from horovod_trainer.errors import NotFound

# sshd and ip stand where not every root's PATH looks.
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# Debian's own switch: neither its init script nor its systemd units start sshd while this file is there, not at
# the installation and not at the next boot. A policy-rc.d would cover the first only, and every other package too.
# sshd itself, started by hand or by the tests, does not look at it; purging the package removes it.
NO_SSHD = Path("/etc/ssh/sshd_not_to_be_run")
NO_SSHD_TEXT = """\
openssh-server was installed for the tests of horovod_trainer, which start sshd inside hosts of their own.
As long as this file is here it does not run as a service; to have one: remove the file, then service ssh start
"""


@dataclass(frozen=True)
class Requirement:
    """One thing the system must have: how to see it and the packages that bring it."""

    name: str
    packages: tuple[str, ...]
    present: Callable[[], bool]


def requirements(hosts: bool = False) -> list[Requirement]:
    """Return all that the environment and the Horovod build need, for this Python; `hosts`: tests/hosts too."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    always = [
        Requirement("venv", (f"{python}-venv",), lambda: importlib.util.find_spec("ensurepip") is not None),
        Requirement("Python.h", (f"{python}-dev",), lambda: Path(sysconfig.get_path("include"), "Python.h").is_file()),
        Requirement("g++", ("g++",), lambda: shutil.which("g++") is not None),
        Requirement("make", ("make",), lambda: shutil.which("make") is not None),
        Requirement("patch", ("patch",), lambda: shutil.which("patch") is not None),
        # Open MPI 4.1 is what Debian and Ubuntu ship; libc6-dev comes with g++.
        Requirement("mpirun", ("openmpi-bin",), lambda: shutil.which("mpirun") is not None),
        Requirement("mpicxx", ("libopenmpi-dev",), lambda: shutil.which("mpicxx") is not None),
    ]
    between = [
        Requirement("ssh", ("openssh-client",), lambda: shutil.which("ssh", path=SYSTEM_PATH) is not None),
        Requirement("sshd", ("openssh-server",), lambda: shutil.which("sshd", path=SYSTEM_PATH) is not None),
        Requirement("ip", ("iproute2",), lambda: shutil.which("ip", path=SYSTEM_PATH) is not None),
    ]
    return always + between if hosts else always


def install_command(missing: list[Requirement]) -> list[str]:
    """Return the exact apt-get command that brings what is missing."""
    packages = [package for requirement in missing for package in requirement.packages]
    return ["apt-get", "install", "-y", "--no-install-recommends", *packages]


def ensure(log: Path, hosts: bool = False) -> None:
    """See that everything is there, installing it when this is root on a system with apt; raise NotFound otherwise."""
    missing = _missing(hosts)
    if not missing:
        return
    command = install_command(missing)
    names = ", ".join(requirement.name for requirement in missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise NotFound(f"the system lacks {names}; on Debian or Ubuntu: {sudo}{' '.join(command)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if any("openssh-server" in requirement.packages for requirement in missing):
        NO_SSHD.parent.mkdir(parents=True, exist_ok=True)
        NO_SSHD.write_text(NO_SSHD_TEXT)
        say(f"== sshd is for the tests' own hosts: {NO_SSHD} keeps it from running as a service")
    run_logged("apt-get update", ["apt-get", "update"], log, env)
    run_logged(f"apt-get install: {' '.join(command[4:])}", command, log, env)
    if still := _missing(hosts):
        raise NotFound(
            f"still missing after {' '.join(command)}: {', '.join(requirement.name for requirement in still)}"
        )


def _missing(hosts: bool) -> list[Requirement]:
    # A package that has just been installed is not yet in the finder's cache of folders.
    importlib.invalidate_caches()
    return [requirement for requirement in requirements(hosts) if not requirement.present()]
