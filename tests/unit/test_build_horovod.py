"""The Horovod build script: reading what tools print, its cache, its patch and its refusals."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docker import build_horovod, commands, install, system_packages
from docker.build_horovod import Target
from horovod_trainer.build_facts import (
    HOROVOD_VERSION,
    Mpi,
    decode_nccl,
    parse_check_build,
    parse_mpi_version,
    parse_nccl_paths,
)
from horovod_trainer.errors import NotFound, TrainerError

ROOT = Path(__file__).resolve().parents[2]
TARGET = Target("2.13.0+cpu", "cpython-311", "OpenMPI4.1.4", nccl=False)

# Recorded: horovodrun --check-build of 0.28.1, with the trailing blanks it prints.
CHECK_BUILD = """\
Horovod v0.28.1:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [X] MPI
    [X] Gloo

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [X] MPI
    [X] Gloo    \n"""


def test_check_build_is_parsed() -> None:
    build = parse_check_build(CHECK_BUILD)
    assert build is not None
    assert build.version == "0.28.1"
    assert build.frameworks == {"PyTorch"}
    assert build.controllers == {"MPI", "Gloo"}
    assert build.operations == {"MPI", "Gloo"}
    assert build.missing(nccl=False) == []
    assert build.missing(nccl=True) == ["tensor operations NCCL"]


def test_check_build_names_all_that_is_missing() -> None:
    # Gloo is named twice, as a controller and as tensor operations: both must be seen.
    text = (
        CHECK_BUILD.replace("[X] Gloo", "[ ] Gloo").replace("[X] PyTorch", "[ ] PyTorch").replace("v0.28.1", "v0.28.0")
    )
    build = parse_check_build(text)
    assert build is not None
    assert build.missing(nccl=False) == [
        "version 0.28.1 (is 0.28.0)",
        "framework PyTorch",
        "controller Gloo",
        "tensor operations Gloo",
    ]


def test_a_traceback_is_no_build() -> None:
    assert (
        parse_check_build("Traceback (most recent call last):\nModuleNotFoundError: No module named 'horovod'\n")
        is None
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
            Mpi("Open MPI", "4.1.4"),
        ),
        (
            "mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            Mpi("Open MPI", "5.0.3"),
        ),
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: Thu Apr  7\n",
            Mpi("MPICH", "4.0.2"),
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\n",
            Mpi("Intel MPI", "2021.10"),
        ),
        ("", None),
        ("mpirun: command not found\n", None),
    ],
)
def test_mpi_flavours(text: str, want: Mpi | None) -> None:
    assert parse_mpi_version(text) == want


def test_nccl_files_of_a_process() -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 42                         "
    maps = "".join(
        f"{line}{path}\n" for path in ("/v/nccl/lib/libnccl.so.2", "/v/nccl/lib/libnccl.so.2", "/u/libnccl.so")
    )
    assert parse_nccl_paths(maps) == ["/v/nccl/lib/libnccl.so.2", "/u/libnccl.so"]
    assert parse_nccl_paths(f"{line}/usr/lib/libc.so.6\n") == []


@pytest.mark.parametrize(("code", "want"), [(22705, "2.27.5"), (21803, "2.18.3"), (2804, "2.8.4")])
def test_nccl_version_codes(code: int, want: str) -> None:
    assert decode_nccl(code) == want


def test_every_difference_is_another_wheel() -> None:
    targets = [
        TARGET,
        Target("2.14.0+cpu", TARGET.python, TARGET.mpi, False),
        Target(TARGET.torch, "cpython-312", TARGET.mpi, False),
        Target(TARGET.torch, TARGET.python, "MPICH4.0.2", False),
        Target(TARGET.torch, TARGET.python, TARGET.mpi, True),
    ]
    keys = [target.key(b"patch") for target in targets] + [TARGET.key(b"another patch")]
    assert len(set(keys)) == len(keys)
    assert all("/" not in key for key in keys)


def test_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("HOROVOD_WHEEL_CACHE", raising=False)
    assert build_horovod.wheel_cache() == Path("/x/horovod-trainer/wheels")
    monkeypatch.setenv("HOROVOD_WHEEL_CACHE", "/own")
    assert build_horovod.wheel_cache() == Path("/own/wheels")


def test_build_environment_cuts_an_outer_make_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -j8 --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "1")
    env = build_horovod.build_environment(TARGET, tmp_path)
    assert "jobserver" not in env["MAKEFLAGS"]
    assert "MAKELEVEL" not in env
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    cuda = build_horovod.build_environment(Target("2.13.0", "cpython-311", "OpenMPI4.1.4", nccl=True), tmp_path)
    assert cuda["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_compile_progress_speaks_once_per_tenth() -> None:
    now = 0.0
    read = build_horovod.compile_progress(lambda: now)
    assert read("-- Found MPI") is None
    now = 60.0
    assert read("  [ 51%] Building CXX object a.o") == "51% of the files after 60 s, about 190 s left"
    assert read("  [ 53%] Building CXX object b.o") is None
    now = 250.0
    assert read("  [100%] Linking") == "100% of the files after 250 s, about 0 s left"


def test_the_patch_applies_exactly_and_refuses_another_source(tmp_path: Path) -> None:
    top, torch = tmp_path / "CMakeLists.txt", tmp_path / "horovod/torch/CMakeLists.txt"
    torch.parent.mkdir(parents=True)
    patch = ["patch", "-p1", "--fuzz=0", "-s", "-d", str(tmp_path), "-i", str(build_horovod.PATCH)]
    top.write_text("\n".join([""] * 16 + ["project(horovod CXX)", "", "set(CMAKE_CXX_STANDARD 11)", ""]))
    torch.write_text("")
    assert subprocess.run([*patch, "--dry-run"], capture_output=True, check=False).returncode != 0
    top.write_text(
        "\n" * 15
        + "\nproject(horovod CXX)\n\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        + "set(CMAKE_CXX_EXTENSIONS OFF)\n\n"
    )
    torch.write_text(
        "\n" * 63
        + "add_definitions(-DPYTORCH_VERSION=${VERSION_DEC} -DTORCH_API_INCLUDE_EXTENSION_H=1)\n"
        + 'set(Pytorch_CXX11 ${Pytorch_CXX11} PARENT_SCOPE)\nif(NOT Pytorch_VERSION VERSION_LESS "1.5.0")\n'
        + "    set(CMAKE_CXX_STANDARD 14)\nendif()\n\n# PyTorch SOURCES\n"
    )
    subprocess.run(patch, check=True)
    assert "set(CMAKE_CXX_STANDARD 17)" in top.read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in torch.read_text()


def test_one_build_at_a_time(tmp_path: Path) -> None:
    with build_horovod._locked(tmp_path), (tmp_path / ".lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def fake_horovodrun(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a horovodrun of the test's own beside the Python that build_horovod takes itself to run with."""
    command = folder / "horovodrun"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_gate_refuses_what_exits_zero_without_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = CHECK_BUILD.replace("[X] Gloo", "[ ] Gloo")
    fake_horovodrun(tmp_path, monkeypatch, f"cat <<'END'\n{text}\nEND")
    with pytest.raises(TrainerError, match="lacks controller Gloo, tensor operations Gloo"):
        build_horovod.gate(nccl=False)


def test_gate_names_the_last_line_of_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_horovodrun(tmp_path, monkeypatch, "echo Traceback >&2; echo 'ImportError: libmpi.so.40' >&2; exit 1")
    with pytest.raises(TrainerError, match=r"ImportError: libmpi\.so\.40"):
        build_horovod.gate(nccl=False)


def test_gate_without_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NotFound, match="Horovod is not installed"):
        build_horovod.gate(nccl=False)


def test_a_wheel_moves_into_the_cache_whole(tmp_path: Path) -> None:
    wheel = tmp_path / ".build-1/wheels/horovod-0.28.1.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"wheel")
    place = tmp_path / "key"
    place.mkdir()
    (place / "stale").touch()
    build_horovod._keep(wheel, place)
    assert [file.name for file in place.iterdir()] == ["horovod-0.28.1.whl"]


def test_failed_command_shows_the_end_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    argv = ["sh", "-c", "seq 1 40; echo broken >&2; exit 3"]
    with pytest.raises(TrainerError, match=f"counting failed with exit status 3; its whole output is in {log}"):
        commands.run_logged("counting", argv, log)
    said = capsys.readouterr().out
    assert "| broken" in said
    assert "| 40" in said
    assert "| 20" not in said
    assert "20" in log.read_text().splitlines()


def test_missing_packages_are_named_with_the_exact_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotFound) as caught:
        system_packages.ensure(tmp_path / "log")
    wanted = "sudo apt-get install -y --no-install-recommends g++ make patch openmpi-bin libopenmpi-dev"
    assert str(caught.value).endswith(wanted)
    assert "lacks g++, make, patch, mpirun, mpicxx" in str(caught.value)


def apt_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, *lacking: str) -> None:
    """Be root on a machine whose apt-get brings the tools that lack, each noted in the folder's `ran`."""
    there = folder / "brought"
    apt = folder / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >> {folder}/ran\n[ "$1" = update ] || touch {there}\n')
    apt.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(system_packages, "NO_SSHD", folder / "ssh/sshd_not_to_be_run")

    def which(name: str, path: str | None = None) -> str | None:
        return None if name in lacking and not there.exists() else f"/usr/bin/{name}"

    monkeypatch.setattr(shutil, "which", which)


def test_hosts_need_sshd_which_is_kept_from_running_as_a_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apt_machine(tmp_path, monkeypatch, "ssh", "sshd", "ip")
    system_packages.ensure(tmp_path / "log")
    assert not (tmp_path / "ran").exists()
    system_packages.ensure(tmp_path / "log", hosts=True)
    packages = "openssh-client openssh-server iproute2"
    assert (tmp_path / "ran").read_text() == f"update\ninstall -y --no-install-recommends {packages}\n"
    assert "remove the file" in system_packages.NO_SSHD.read_text()
    assert str(system_packages.NO_SSHD) in capsys.readouterr().out


def test_an_sshd_that_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt_machine(tmp_path, monkeypatch, "ip")
    system_packages.ensure(tmp_path / "log", hosts=True)
    assert (tmp_path / "ran").read_text().endswith(" iproute2\n")
    assert not system_packages.NO_SSHD.exists()


@pytest.mark.parametrize(
    ("extras", "user", "want"), [(["data", "dev"], 0, True), (["data"], 0, False), (["dev"], 1000, False)]
)
def test_only_roots_test_environment_asks_for_hosts(
    extras: list[str], user: int, want: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def ensure(log: Path, hosts: bool) -> None:
        asked.append(hosts)
        raise NotFound("enough seen")

    monkeypatch.setattr(system_packages, "ensure", ensure)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(NotFound):
        install.install(tmp_path / "venv", extras, "")
    assert asked == [want]


def test_torch_comes_locally_first_then_from_the_index() -> None:
    local, remote = install.torch_commands(["pip"], "torch==2.13.0", "https://example.org/cpu")
    assert "--no-index" in local
    assert remote[-2:] == ["--index-url", "https://example.org/cpu"]
    assert "--index-url" not in install.torch_commands(["pip"], "torch==2.13.0", "")[1]


def test_pins_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert install.torch_pin((ROOT / "constraints.txt").read_text()) in project["dependencies"]
    assert f"horovod=={HOROVOD_VERSION}" in project["optional-dependencies"]["horovod"]
    assert "torch" not in install.BUILD_TOOLS
