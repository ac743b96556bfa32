"""Facts about this machine and build for `check`, each ok or not with its fix (L3; heavy imports happen inside)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from horovod_trainer.build_facts import (
    HOROVOD_VERSION,
    CheckBuild,
    Mpi,
    decode_nccl,
    parse_check_build,
    parse_mpi_version,
    parse_nccl_paths,
)
from horovod_trainer.cores import cpu_quota, usable_cores

REBUILD = "build it again: .venv/bin/python -m docker.build_horovod"
DISTRIBUTIONS = ("torch", "torch-geometric", "numpy", "numba", "mpi4py", "ogb", "tensorboardX")
# Open MPI's shared-memory segments take about 4 MiB a rank; NCCL's buffers fail at a container's default of 64 MiB.
SHM_CPU, SHM_CUDA = 32 << 20, 512 << 20
OPEN_FILES = 1024  # sockets to every rank, the mapped arrays, the event files
SLOW_BF16 = 1.2  # bf16 GEMM time over float32's, from which bf16 costs more than it saves
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Fact:
    """One thing found: its name and value, whether it is good enough to train here, and what to do when not.

    required: training needs it; otherwise it is worth knowing.
    """

    name: str
    value: str
    ok: bool = True
    fix: str = ""
    required: bool = True


def collect_facts() -> list[Fact]:
    """Return every fact, in the order they are shown; takes seconds (imports torch, asks horovodrun and mpirun)."""
    facts = [Fact("python", platform.python_version()), *map(distribution_fact, DISTRIBUTIONS)]
    gpus = _gpu_names()
    has_gpu = bool(gpus)
    facts.append(wheel_fact(_wheel_torch(), _version("torch")))
    facts += horovod_facts(parse_check_build(_output([_sibling("horovodrun"), "--check-build"])), has_gpu)
    facts.append(mpi_fact(parse_mpi_version(_output(["mpirun", "--version"]))))
    facts.append(cuda_fact(_cuda_version(), gpus, Path("/proc/driver/nvidia/version").exists()))
    facts += nccl_facts(*_nccl_versions()) if has_gpu else [Fact("NCCL", "none (no GPU)")]
    facts += system_facts(has_gpu)
    facts += [cores_fact(usable_cores(), cpu_quota(), len(os.sched_getaffinity(0))), threads_fact(), numba_fact()]
    return [*facts, bf16_fact(bf16_ratio())]


def distribution_fact(name: str) -> Fact:
    """Return the installed version of a distribution."""
    version = _version(name)
    fix = f"pip install -c constraints.txt {name}"
    return _judge(name, version or "not installed", version is not None, fix)


def horovod_facts(build: CheckBuild | None, nccl: bool) -> list[Fact]:
    """Return Horovod's version, controllers and tensor operations; `nccl`: GPUs are here, so NCCL is needed."""
    if build is None:
        return [Fact("horovod", "not installed", False, REBUILD)]
    controllers, operations = {"MPI", "Gloo"}, {"MPI", "Gloo", "NCCL"} if nccl else {"MPI", "Gloo"}
    return [
        _judge("horovod", build.version, build.version == HOROVOD_VERSION and "PyTorch" in build.frameworks, REBUILD),
        _judge("horovod controllers", _list(build.controllers), controllers <= build.controllers, REBUILD),
        _judge("horovod tensor operations", _list(build.operations), operations <= build.operations, REBUILD),
    ]


def wheel_fact(built_for: str | None, torch: str | None) -> Fact:
    """Judge the torch version Horovod was built for against the one installed; another one crashes or does not load."""
    fix = f"torch {torch} is installed; {REBUILD}"
    return _judge("horovod built for torch", built_for or "none", built_for is not None and built_for == torch, fix)


def mpi_fact(mpi: Mpi | None) -> Fact:
    """Return the MPI's flavour and version; Open MPI 5 is flagged."""
    if mpi is None:
        fix = "apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev"
        return Fact("MPI", "no mpirun we know", False, fix)
    if mpi.flavour == "Open MPI" and mpi.major >= 5:
        fix = (
            "Open MPI 5 ignores the OMPI_MCA_orte_* environment of mpi-operator and starts every rank on the launcher: "
            "use 4.1, or pass --hostfile and set PRTE_MCA_prte_default_hostfile, PRTE_MCA_prte_set_default_slots "
            "and PRTE_MCA_plm_ssh_args"
        )
        return Fact("MPI", str(mpi), False, fix)
    return Fact("MPI", str(mpi))


def cuda_fact(version: str | None, gpus: list[str], driver: bool) -> Fact:
    """Judge torch's CUDA version (None: a CPU build) and the GPUs it sees, when NVIDIA's driver is here or not."""
    if version is None:
        fix = "this torch is a CPU build: install again with TORCH_INDEX= (empty) to get CUDA, then Horovod"
        return _judge("CUDA", "none", not driver, fix)
    if not gpus:
        fix = "a driver is here but torch sees no GPU: compare nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _judge("CUDA", f"{version}, no GPU", not driver, fix)
    return Fact("CUDA", f"{version}, {len(gpus)} x {gpus[0]}")


def nccl_facts(torch_version: str, horovod_version: str) -> list[Fact]:
    """Return the NCCL that torch uses and the one Horovod uses; two different ones in a process hang or crash."""
    same = torch_version == horovod_version
    fix = f"Horovod must link the NCCL that torch loads; {REBUILD}"
    return [Fact("NCCL of torch", torch_version), _judge("NCCL of horovod", horovod_version, same, fix)]


def system_facts(has_gpu: bool) -> list[Fact]:
    """Return memlock, /dev/shm and open files; what is enough depends on whether there are GPUs and RDMA devices."""
    rdma = Path("/sys/class/infiniband")
    return [
        memlock_fact(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma.is_dir() and any(rdma.iterdir())),
        shm_fact(shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0, has_gpu),
        open_files_fact(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]


def memlock_fact(limit: int, rdma: bool) -> Fact:
    """Judge the locked-memory limit in bytes; only RDMA devices register memory."""
    fix = "ulimit -l unlimited (in a pod: the IPC_LOCK capability and the runtime's limit); RDMA fails without"
    ok = limit == UNLIMITED or not rdma
    return _judge("locked memory", "unlimited" if limit == UNLIMITED else size(limit), ok, fix)


def shm_fact(total: int, has_gpu: bool) -> Fact:
    """Judge the size of /dev/shm in bytes."""
    need = SHM_CUDA if has_gpu else SHM_CPU
    fix = f"give at least {size(need)}: docker run --shm-size, or an emptyDir with medium Memory at /dev/shm"
    return _judge("/dev/shm", size(total), total >= need, fix)


def open_files_fact(limit: int) -> Fact:
    """Judge the soft limit of open files."""
    ok = limit == UNLIMITED or limit >= OPEN_FILES
    return _judge("open files", "unlimited" if limit == UNLIMITED else str(limit), ok, "ulimit -n 65536")


def cores_fact(usable: float, quota: float | None, affinity: int) -> Fact:
    """Judge the cores this process may use; below one, even a single rank is throttled."""
    limit = "no quota" if quota is None else f"quota {quota:g}"
    fix = "raise the container's CPU limit to at least one core per rank"
    return _judge("CPU cores", f"{usable:g} usable ({limit}, affinity {affinity})", usable >= 1, fix)


def threads_fact() -> Fact:
    """Return torch's threads and OMP_NUM_THREADS; more threads than usable cores slow every kernel."""
    import torch

    threads, cores = torch.get_num_threads(), math.ceil(usable_cores())
    value = f"torch {threads}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    fix = f"export OMP_NUM_THREADS={cores}; `train` sets its own share per rank"
    return _judge("threads", value, threads <= cores, fix)


def numba_fact() -> Fact:
    """Return the threading layer numba will choose: the first of TBB, OpenMP, workqueue that loads."""
    wanted = os.environ.get("NUMBA_THREADING_LAYER", "default")
    for layer, module in (("tbb", "tbbpool"), ("omp", "omppool"), ("workqueue", "workqueue")):
        if wanted in ("default", layer) and _loads(f"numba.np.ufunc.{module}"):
            return Fact("numba threading layer", layer)
    fix = "unset NUMBA_THREADING_LAYER, or apt-get install -y libgomp1"
    return Fact("numba threading layer", f"none for {wanted}", False, fix)


def bf16_fact(ratio: float) -> Fact:
    """Judge a bf16 matrix product's time over float32's on this CPU."""
    fix = "keep float32 on this CPU: it has no fast bf16 units"
    fact = _judge("bf16 on CPU", f"{ratio:.2f} x the time of float32", ratio <= SLOW_BF16, fix)
    return replace(fact, required=False)  # float32 is the default


def bf16_ratio(width: int = 384, seconds: float = 0.15) -> float:
    """Measure the best time of a [width, width] bf16 product over float32's, trying each for `seconds`."""
    import torch

    def best(kind: torch.dtype) -> float:
        left = torch.ones(width, width, dtype=kind)
        times = [math.inf]
        until = time.perf_counter() + seconds
        while (start := time.perf_counter()) < until:
            torch.mm(left, left)
            times.append(time.perf_counter() - start)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, a busy neighbour is measured instead
    try:
        return best(torch.bfloat16) / best(torch.float32)
    finally:
        torch.set_num_threads(threads)


def size(count: int) -> str:
    """Return bytes for people: `64 MiB`, `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _judge(name: str, value: str, ok: bool, fix: str) -> Fact:
    return Fact(name, value, ok, "" if ok else fix)


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def _gpu_names() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.version.cuda else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _nccl_versions() -> tuple[str, str]:
    """Return (torch's NCCL, the NCCL file a process has mapped once Horovod is imported too)."""
    import torch

    ours = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch leaves it so
    # In a process of its own: a Horovod built against another NCCL may crash the one that imports it.
    program = "import ctypes, sys, horovod.torch\nsys.stdout.write(open('/proc/self/maps').read())\n"
    paths = parse_nccl_paths(_output([sys.executable, "-c", program]))
    return ours, " and ".join(map(_nccl_version, paths)) or "none"


def _nccl_version(path: str) -> str:
    """Ask a libnccl for its version; 2.27.5 is coded as 22705."""
    import ctypes

    code = ctypes.c_int()
    if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code)) != 0:
        return f"unknown ({path})"
    return decode_nccl(code.value)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheel_torch() -> str | None:
    """Return the torch version the installed Horovod noted at its build; found without importing it."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    try:
        noted = json.loads(Path(spec.origin).with_name("metadata.json").read_text())
    except (OSError, ValueError):
        return None
    return str(noted.get("pytorch"))


def _sibling(command: str) -> str:
    """Return the command beside this Python, or its bare name."""
    beside = Path(sys.executable).with_name(command)
    return str(beside) if beside.is_file() else command


def _output(argv: list[str]) -> str:
    """Return a command's standard output, empty when it is not there or does not answer within three minutes."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=180).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _loads(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
