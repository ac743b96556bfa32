"""Make the virtual environment: `python3 -m docker.install --extras horovod,data`; quick when all is there already.

Standard library only; runs with the system's Python (3.11 or later), everything else with the environment's own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from docker import system_packages
from docker.commands import exit_code, run_logged, say
from horovod_trainer.errors import TrainerError

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# What builds Horovod and this package; CMake 4 refuses Horovod's third-party files.
BUILD_TOOLS = ("setuptools", "wheel", "packaging", "cmake<4")
# PyTorch's own index of CPU wheels: PyPI's wheel brings gigabytes of CUDA. An empty TORCH_INDEX means PyPI.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def torch_pin(constraints: str) -> str:
    """Return the `torch==X` line of the constraints' text."""
    found = re.search(r"^torch==\S+", constraints, re.MULTILINE)
    if found is None:
        raise TrainerError(f"{CONSTRAINTS.name} does not pin torch")
    return found[0]


def torch_commands(pip: list[str], pin: str, index: str) -> list[list[str]]:
    """Return the ways to install torch, best first: a wheel this machine's pip knows locally, then the index."""
    # Its dependencies come with the other packages, from PyPI and pinned.
    base = [*pip, "install", "--quiet", "--no-deps", pin]
    return [[*base, "--no-index"], [*base, *(["--index-url", index] if index else [])]]


def make_environment(folder: Path) -> Path:
    """Create the environment unless it works, and return its Python."""
    python = folder / "bin" / "python"
    probe = [str(python), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        say(f"== virtual environment {folder} (Python {sys.version.split()[0]})")
        try:
            venv.create(folder, with_pip=True, clear=True)
        except subprocess.CalledProcessError as error:
            raise TrainerError(f"the virtual environment {folder} cannot be made: {error}") from error
    return python


def install_torch(python: Path, pin: str, index: str, log: Path) -> None:
    """Install torch unless the pinned version is there."""
    version = f"import importlib.metadata as m; print(m.version('torch').split('+')[0] == {pin.split('==')[1]!r})"
    have = subprocess.run([str(python), "-c", version], capture_output=True, text=True, check=False)
    if have.stdout.strip() == "True":
        return
    local, remote = torch_commands([str(python), "-m", "pip"], pin, index)
    if subprocess.run(local, capture_output=True, check=False).returncode == 0:
        say(f"== {pin} from a local wheel")
        return
    run_logged(f"{pin} from {index or 'the default index'} (about 200 MB for CPU, gigabytes for CUDA)", remote, log)


def install(folder: Path, extras: list[str], index: str) -> None:
    """Bring the environment to what `extras` need; each stage says what it does."""
    log = folder.parent / f"{folder.name}.log"
    log.unlink(missing_ok=True)
    # tests/hosts needs more of the system; only root can make hosts, so nobody else is asked for it.
    system_packages.ensure(log, hosts="dev" in extras and os.geteuid() == 0)
    python = make_environment(folder)
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS)]
    run_logged("build tools", [*pip, *BUILD_TOOLS], log)
    install_torch(python, torch_pin(CONSTRAINTS.read_text()), index, log)
    others = [extra for extra in extras if extra != "horovod"]
    _install_self(pip, others, log)
    if "horovod" in extras:
        done = subprocess.run([str(python), "-m", "docker.build_horovod"], cwd=ROOT, check=False)
        if done.returncode != 0:
            raise SystemExit(done.returncode)
        # Horovod is there now, so that pip does not try to build it itself.
        _install_self(pip, extras, log)
    log.unlink(missing_ok=True)


def _install_self(pip: list[str], extras: list[str], log: Path) -> None:
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    label = f"this package and what it needs ({', '.join(extras) or 'no extras'})"
    run_logged(label, [*pip, "--no-build-isolation", "-e", target], log)


def main() -> int:
    """Parse the command line, install, and return the exit code."""
    parser = argparse.ArgumentParser(prog="docker.install", description="Make the virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder")
    parser.add_argument("--extras", default="", help="comma-separated: horovod, data, cluster, ansible, dev")
    arguments = parser.parse_args()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    extras = [extra for extra in arguments.extras.split(",") if extra]
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    return exit_code(lambda: install(arguments.venv.resolve(), extras, index))


if __name__ == "__main__":
    sys.exit(main())
