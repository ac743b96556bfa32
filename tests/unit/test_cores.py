"""The cores a process may use, from recorded cgroup files under a root of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod_trainer import cores


def make_root(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write /proc/self/cgroup and the given files below /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup", "files", "want"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, id="v2-container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="v2-unlimited"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0, id="v2-parent"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "4 1\n"}, 0.5, id="v2-tightest"),
        pytest.param("0::/kubepods/pod1\n", {"cpu.max": "300000 100000\n"}, 3.0, id="v2-host-path-in-container"),
        pytest.param(
            "4:memory:/x\n3:cpu,cpuacct:/docker/1\n",
            {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n"},
            2.5,
            id="v1",
        ),
        pytest.param(
            "3:cpu,cpuacct:/docker/1\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
            id="v1-unlimited",
        ),
        pytest.param("", {}, None, id="no-cgroup"),
    ],
)
def test_quota(tmp_path: Path, cgroup: str, files: dict[str, str], want: float | None) -> None:
    assert cores.cpu_quota(make_root(tmp_path, cgroup, files)) == want


def test_missing_root_is_no_limit(tmp_path: Path) -> None:
    assert cores.cpu_quota(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("quota", "want"), [(None, 4.0), (1.5, 1.5), (64.0, 4.0)])
def test_usable_is_the_smaller_of_quota_and_affinity(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, want: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.usable_cores() == want
