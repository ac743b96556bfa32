"""Make the environment of the programs we compare with: PyG with torch-scatter and torch-sparse, and ogb; quick when there.

Part of `make bench-setup`. The two extensions have no wheels for this torch: they are compiled from their sdists, and the
wheels kept beside the environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import cache
from docker import system_packages
from docker.commands import exit_code, run_logged, say
from docker.install import CONSTRAINTS, TORCH_INDEX, install_torch, make_environment, torch_pin
from horovod_trainer.cores import usable_cores

# ogb asks for its newest version through pkg_resources, which setuptools 81 no longer has.
BUILD_TOOLS = ("setuptools==80.10.2", "wheel", "ninja==1.13.2", "numpy")
PACKAGES = ("torch-geometric", "ogb", "pandas", "scipy", "psutil")  # at the versions of our constraints
EXTENSIONS = ("torch-scatter==2.1.2", "torch-sparse==0.6.18")
STAMP = "complete"
PROBE = "import ogb.linkproppred, pandas, torch_geometric.loader, torch_geometric.nn, torch_scatter, torch_sparse"


def peer_constraints(ours: str) -> str:
    """Return our constraints' text with the one version that the peers need otherwise."""
    return re.sub(r"^setuptools==.*$", BUILD_TOOLS[0], ours, flags=re.MULTILINE)


def wanted(ours: str, index: str) -> dict[str, object]:
    """Return what the environment is made of; any difference to its stamp makes it anew."""
    names = {re.split("[=<]", word)[0] for word in (*BUILD_TOOLS, *PACKAGES)}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", peer_constraints(ours), re.MULTILINE))
    return {
        "python": list(sys.version_info[:2]),
        "torch": torch_pin(ours),
        "index": index,
        "extensions": list(EXTENSIONS),
        "packages": {name: pins[name] for name in sorted(names) if name in pins},
    }


def wheel_pattern(requirement: str) -> str:
    """Return the glob of the file names that a wheel of `name==version` has for this Python."""
    name, version = requirement.split("==")
    return f"{name.replace('-', '_')}-{version}-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl"


def provide(folder: Path, index: str) -> None:
    """Bring the environment in `folder` to what is wanted, each stage saying what it does."""
    ours = CONSTRAINTS.read_text()
    recipe, stamp, log = wanted(ours, index), folder / STAMP, folder.parent / "peers.log"
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        say(f"== the peers' environment {folder} is there")
        return
    say("== pyg-lib, PyG's faster sampler, has no wheel on PyPI for this torch: PyG samples with torch-sparse")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    system_packages.ensure(log)
    python = make_environment(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text(peer_constraints(ours))
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--quiet", "-c", str(constraints)]
    run_logged("build tools and numpy", [*install, *BUILD_TOOLS], log)
    install_torch(python, torch_pin(ours), index, log)
    run_logged(f"what torch needs, {', '.join(PACKAGES)}", [*install, torch_pin(ours), *PACKAGES], log)
    wheels = [_wheel(requirement, python, folder.parent / "wheels", log) for requirement in EXTENSIONS]
    run_logged(" ".join(EXTENSIONS), [*pip, "install", "--quiet", "--no-deps", *map(str, wheels)], log)
    run_logged("import them all", [str(python), "-c", PROBE], log)
    stamp.write_text(json.dumps(recipe, indent=1) + "\n")
    log.unlink(missing_ok=True)


def _wheel(requirement: str, python: Path, kept: Path, log: Path) -> Path:
    """Return the kept wheel of a requirement for the environment's torch, compiled first unless it is there."""
    probe = [str(python), "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    place = kept / f"torch-{torch}"  # a wheel's name does not say which torch it was built against
    place.mkdir(parents=True, exist_ok=True)
    if found := next(place.glob(wheel_pattern(requirement)), None):
        say(f"== {requirement}: kept wheel {found.name}")
        return found
    jobs = str(max(1, int(usable_cores())))
    env = {**os.environ, "MAX_JOBS": jobs, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    with tempfile.TemporaryDirectory(dir=place, prefix=".build-") as folder:
        # Not from pip's own cache: a wheel there may have been built against another torch.
        argv = [str(python), "-m", "pip", "wheel", "--no-cache-dir", "--no-build-isolation", "--no-deps", "--no-binary"]
        label = f"compile {requirement} with {jobs} jobs (5 to 30 minutes on 2 cores, once)"
        run_logged(label, [*argv, requirement.split("==")[0], "-w", folder, requirement], log, env)
        built = next(Path(folder).glob(wheel_pattern(requirement)))
        return built.rename(place / built.name)


def main() -> int:
    """Make the environment and return the exit code."""
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return exit_code(lambda: provide(cache.folder() / "peers", os.environ.get("TORCH_INDEX", TORCH_INDEX)))


if __name__ == "__main__":
    sys.exit(main())
