"""What Horovod and MPI say about their own builds, parsed from their text (L0: standard library only; pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

HOROVOD_VERSION = "0.28.1"  # the last release; pyproject.toml and docker/build_horovod.py speak of the same

# Each flavour's `mpirun --version`, by the words only it prints.
_MPI_FLAVOURS = (
    ("Open MPI", re.compile(r"\(Open(?: MPI|RTE)\)\s+([\d.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+([\d.]+)")),
)


@dataclass(frozen=True)
class Mpi:
    """An MPI's flavour (`Open MPI`, `MPICH`, `Intel MPI`) and its version, such as `4.1.4`."""

    flavour: str
    version: str

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.split(".")[0])

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


@dataclass(frozen=True)
class CheckBuild:
    """What `horovodrun --check-build` lists; each set holds the names with an X, such as `PyTorch`, `Gloo`, `NCCL`."""

    version: str
    frameworks: frozenset[str]
    controllers: frozenset[str]
    operations: frozenset[str]

    def missing(self, nccl: bool) -> list[str]:
        """Return what we need and the build lacks; empty when it is good. `nccl`: GPU operations are needed."""
        lacks = [] if self.version == HOROVOD_VERSION else [f"version {HOROVOD_VERSION} (is {self.version})"]
        lacks += [f"framework {name}" for name in ("PyTorch",) if name not in self.frameworks]
        lacks += [f"controller {name}" for name in ("MPI", "Gloo") if name not in self.controllers]
        wanted = ("MPI", "Gloo", "NCCL") if nccl else ("MPI", "Gloo")
        return lacks + [f"tensor operations {name}" for name in wanted if name not in self.operations]


def parse_mpi_version(text: str) -> Mpi | None:
    """Return the MPI that printed `text` on `mpirun --version`, or None when it is none we know."""
    for flavour, pattern in _MPI_FLAVOURS:
        if found := pattern.search(text):
            return Mpi(flavour, found[1])
    return None


def parse_check_build(text: str) -> CheckBuild | None:
    """Parse `horovodrun --check-build` (it exits 0 whatever it finds); None when the text is something else."""
    version = re.search(r"^Horovod v(\S+):", text, re.MULTILINE)
    if version is None:
        return None
    sections: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in text.splitlines():
        if heading := re.match(r"\s*Available (.+):\s*$", line):
            current = sections.setdefault(heading[1], set())
        elif ticked := re.match(r"\s*\[X\] (\S+)", line):
            current.add(ticked[1])
    names = ("Frameworks", "Controllers", "Tensor Operations")
    return CheckBuild(version[1], *(frozenset(sections.get(name, set())) for name in names))


def parse_nccl_paths(maps: str) -> list[str]:
    """Return the distinct libnccl files in the text of a process's /proc/PID/maps, in order of appearance."""
    return list(dict.fromkeys(re.findall(r"(/\S*libnccl\.so\S*)", maps)))


def decode_nccl(code: int) -> str:
    """Return NCCL's version code as text: 22705 is 2.27.5, and before 2.9 2804 was 2.8.4."""
    major = 10_000 if code >= 10_000 else 1_000
    return f"{code // major}.{code % major // 100}.{code % 100}"
