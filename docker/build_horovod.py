"""Build, cache, install and check the Horovod wheel this project runs on: `.venv/bin/python -m docker.build_horovod`.

Standard library only; the environment it runs in must hold torch, setuptools, wheel, packaging and CMake 3.x.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docker import system_packages
from docker.commands import exit_code, run_logged, say
from horovod_trainer.build_facts import HOROVOD_VERSION as VERSION
from horovod_trainer.build_facts import parse_check_build, parse_mpi_version
from horovod_trainer.cores import usable_cores
from horovod_trainer.errors import InvalidInput, NotFound, TrainerError

SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH = Path(__file__).with_name(f"horovod-{VERSION}-cxx17.patch")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
# How much of the time has passed at each tenth of CMake's files, measured on two cores: the torch ones come last.
TIME_SHARE = (0.0, 0.13, 0.15, 0.19, 0.20, 0.24, 0.28, 0.39, 0.48, 0.64, 1.0)
PIP = [sys.executable, "-m", "pip"]


@dataclass(frozen=True)
class Target:
    """What a wheel is built for; any difference is another wheel."""

    torch: str
    python: str
    mpi: str
    nccl: bool

    def key(self, patch: bytes) -> str:
        """Return the name of this wheel's folder in the cache."""
        variant = "cuda" if self.nccl else "cpu"
        recipe = hashlib.sha256(patch + SDIST_SHA256.encode()).hexdigest()[:8]
        return re.sub(r"[^\w.+-]", "", f"torch{self.torch}-{self.python}-{self.mpi}-{variant}-{recipe}")


def wheel_cache() -> Path:
    """Return the folder all wheels are kept in: outside any clone, so that a fresh clone finds them."""
    if own := os.environ.get("HOROVOD_WHEEL_CACHE"):
        return Path(own) / "wheels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-trainer" / "wheels"


def find_target(variant: str) -> Target:
    """Return the target of this environment; `variant` auto takes NCCL when torch has CUDA and nvcc is here."""
    try:
        import torch
    except ImportError as error:
        raise NotFound(f"torch is not installed in {sys.prefix}; install it first: pip install torch") from error
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
    able = torch.version.cuda is not None and nvcc is not None
    if variant == "cuda" and not able:
        lack = "nvcc (set CUDA_HOME or PATH)" if torch.version.cuda else "CUDA in torch (this is a CPU build of torch)"
        raise NotFound(f"a CUDA build of Horovod was asked for, but there is no {lack}")
    if variant == "auto" and torch.version.cuda and not able:
        say(
            "warning: torch has CUDA but there is no nvcc here: building without NCCL, GPUs will go through MPI or Gloo"
        )
    text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    mpi = parse_mpi_version(text)
    if mpi is None:
        raise InvalidInput(f"mpirun --version is neither Open MPI, MPICH nor Intel MPI: {text.strip()[:80]!r}")
    nccl = able and variant != "cpu"
    return Target(torch.__version__, sys.implementation.cache_tag or "python", str(mpi).replace(" ", ""), nccl)


def build(target: Target, folder: Path, log: Path) -> Path:
    """Build the wheel inside `folder` and return its path."""
    source = _unpack(_download(folder, log), folder)
    run_logged(f"patch with {PATCH.name}", ["patch", "-p1", "--fuzz=0", "-d", str(source), "-i", str(PATCH)], log)
    wheels = folder / "wheels"
    argv = [*PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(source)]
    run_logged(
        f"Horovod {VERSION} wheel for {target.key(PATCH.read_bytes())} (about 5 minutes on 2 cores, once per machine)",
        argv,
        log,
        build_environment(target, folder),
        compile_progress(time.monotonic),
    )
    return next(wheels.glob("horovod-*.whl"))


def build_environment(target: Target, folder: Path) -> dict[str, str]:
    """Return the environment of the build: its switches, this environment's tools first, one job per usable core."""
    env = {key: value for key, value in os.environ.items() if key not in ("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")}
    env |= {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        # Also keeps the job server of a make above us out of this build.
        "MAKEFLAGS": f"-j{max(1, int(usable_cores()))}",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)]),
    }
    if target.nccl:
        env |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
        if home := _torch_nccl(folder):
            env["HOROVOD_NCCL_HOME"] = str(home)
    return env


def compile_progress(clock: Callable[[], float]) -> Callable[[str], str | None]:
    """Return a reader of CMake's `[ 46%]` lines that says every tenth how far the build is and how long it may take."""
    start = clock()
    told = 0

    def read(line: str) -> str | None:
        nonlocal told
        found = re.match(r"\s*\[\s*(\d+)%\]", line)
        if found is None or int(found[1]) // 10 <= told:
            return None
        told = int(found[1]) // 10
        elapsed, share = clock() - start, TIME_SHARE[told]
        return f"{found[1]}% of the files after {elapsed:.0f} s, about {elapsed * (1 - share) / share:.0f} s left"

    return read


def gate(nccl: bool) -> None:
    """Refuse an installed Horovod that lacks what we need; `horovodrun --check-build` itself always exits 0."""
    command = Path(sys.executable).with_name("horovodrun")
    if not command.is_file():
        raise NotFound(f"{command} is not there: Horovod is not installed")
    done = subprocess.run([str(command), "--check-build"], capture_output=True, text=True, check=False)
    facts = parse_check_build(done.stdout)
    if facts is None:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise TrainerError(f"horovodrun --check-build did not report a build: {reason}")
    if lacks := facts.missing(nccl):
        raise TrainerError(f"this Horovod build lacks {', '.join(lacks)}")
    controllers, operations = ", ".join(sorted(facts.controllers)), ", ".join(sorted(facts.operations))
    say(f"   Horovod {facts.version}: controllers {controllers}; tensor operations {operations}")


def provide(variant: str) -> None:
    """Install a Horovod that passes the gate, from the cache or freshly built."""
    cache = wheel_cache()
    log = cache.parent / "build.log"
    system_packages.ensure(log)
    target = find_target(variant)
    place = cache / target.key(PATCH.read_bytes())
    with _locked(cache):
        wheel = next(place.glob("horovod-*.whl"), None)
        if wheel is not None:
            _install(wheel, log)
            try:
                gate(target.nccl)
            except TrainerError as error:
                raise TrainerError(f"{error}; build it again after: rm -r {place}") from error
            return
        log.unlink(missing_ok=True)
        for killed in cache.glob(".build-*"):
            shutil.rmtree(killed, ignore_errors=True)
        # Beside its place, so that the rename at the end stays on one file system.
        with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
            wheel = build(target, Path(folder), log)
            _install(wheel, log)
            gate(target.nccl)
            # Only a wheel that passed is kept.
            _keep(wheel, place)


def _download(folder: Path, log: Path) -> Path:
    wanted = folder / "horovod.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    # pip checks the digest before it looks inside; without isolation it needs no network beyond this one file.
    argv = [*PIP, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    run_logged(f"download horovod {VERSION}", [*argv, "-d", str(folder), "-r", str(wanted)], log)
    return folder / f"horovod-{VERSION}.tar.gz"


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extractall(folder, filter="data")
        else:  # Python 3.11.0 to 3.11.3; the archive's digest is known
            opened.extractall(folder)
    return folder / f"horovod-{VERSION}"


def _torch_nccl(folder: Path) -> Path | None:
    """Return a folder with the headers and library of the NCCL wheel that torch loads, or None when it has no wheel.

    The wheel holds libnccl.so.2 only, the linker wants libnccl.so; at run time torch has loaded it already.
    """
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        return None
    wheel = Path(next(iter(spec.submodule_search_locations)))
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(wheel / "include")
    (home / "lib" / "libnccl.so").symlink_to(wheel / "lib" / "libnccl.so.2")
    return home


def _install(wheel: Path, log: Path) -> None:
    # Forced, since the same version may be there for another torch; then what it needs, which must not be forced.
    install = [*PIP, "install", "--quiet", "-c", str(CONSTRAINTS)]
    run_logged(f"install {wheel.name}", [*install, "--no-deps", "--force-reinstall", str(wheel)], log)
    run_logged("install what Horovod needs", [*install, str(wheel)], log)


def _keep(wheel: Path, place: Path) -> None:
    with wheel.open("rb") as written:
        os.fsync(written.fileno())
    shutil.rmtree(place, ignore_errors=True)
    wheel.parent.rename(place)


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the cache for one build at a time; the lock goes with the process."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"   another build holds {cache}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Parse the command line, provide Horovod, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="docker.build_horovod", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument(
        "--variant", choices=("auto", "cpu", "cuda"), default="auto", help="auto: NCCL when CUDA is here"
    )
    arguments = parser.parse_args()
    return exit_code(lambda: provide(arguments.variant))


if __name__ == "__main__":
    sys.exit(main())
