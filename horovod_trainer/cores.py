"""How many CPU cores this process may really use: its cgroup's quota and its affinity (L0: standard library only)."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def usable_cores() -> float:
    """Return the cores this process may use, min(cgroup quota, affinity); a fraction when the quota is one."""
    affinity = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota()
    return affinity if quota is None else min(affinity, quota)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the tightest CPU quota of this process's cgroup and its parents, in cores, or None when there is none.

    `root` is where /proc and /sys are looked for (tests pass a folder of their own).
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _folder_quota(folder)) is not None]
    return min(quotas, default=None)


def parse_cgroup(text: str) -> list[tuple[frozenset[str], str]]:
    """Parse /proc/self/cgroup into (controllers, path) pairs; version 2's line has no controllers."""
    entries = []
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            entries.append((frozenset(filter(None, parts[1].split(","))), parts[2]))
    return entries


def parse_cpu_max(text: str) -> float | None:
    """Parse cgroup v2's cpu.max (`150000 100000` or `max 100000`) into cores; None is no limit."""
    fields = text.split()
    if not fields or fields[0] == "max":
        return None
    period = float(fields[1]) if len(fields) > 1 else 100_000.0
    return float(fields[0]) / period


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders that can hold a quota for this process: its own cgroup and each parent, both versions."""
    base = root / "sys/fs/cgroup"
    folders = []
    for controllers, path in parse_cgroup(_read(root / "proc/self/cgroup") or ""):
        if not controllers:
            # Version 2 is mounted at the base itself, or under unified/ on a machine that mixes both.
            mounts = [base, base / "unified"]
        elif "cpu" in controllers:
            mounts = [base / "cpu", base / "cpu,cpuacct", base / "cpuacct,cpu"]
        else:
            continue
        # A container may see the host's path in /proc and its own cgroup at the mount: both exist or neither matters.
        relative = PurePosixPath(path.lstrip("/"))
        folders += [mount / part for mount in mounts for part in (relative, *relative.parents)]
    return folders


def _folder_quota(folder: Path) -> float | None:
    if (text := _read(folder / "cpu.max")) is not None:
        return parse_cpu_max(text)
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    """Return the file's text, or None where it is absent or may not be read (usual in containers)."""
    try:
        return path.read_text()
    except OSError:
        return None
