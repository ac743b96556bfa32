"""Reading other processes' memory: what is a rank, and what counts as its own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.footprint import Footprint, footprint, horovodrun, ranks
from benchmarks.memory import largest, private, total_pss

MIB = 1 << 20


def now() -> Footprint:
    found = footprint(os.getpid())
    assert found is not None
    return found


def test_own_memory_is_anonymous_and_a_mapped_array_is_not(tmp_path: Path) -> None:
    before = now()
    own = b"x" * (64 * MIB)
    with_own = now()
    assert with_own.anonymous - before.anonymous == pytest.approx(64, abs=4)
    assert with_own.uss - before.uss == pytest.approx(64, abs=4)
    file = tmp_path / "file.npy"
    with file.open("wb") as writing:
        writing.write(own)
        os.fsync(writing.fileno())
    with file.open("rb") as reading, mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:].count(b"y") == 0
        with_file = now()
    assert with_file.uss - with_own.uss == pytest.approx(64, abs=4)
    assert with_file.clean - with_own.clean == pytest.approx(64, abs=4)
    assert with_file.anonymous - with_own.anonymous == pytest.approx(0, abs=4)


def test_a_process_that_has_ended_has_no_footprint() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert footprint(gone.pid) is None


def test_ranks_are_the_module_s_processes_below_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text("import sys\nprint('here', flush=True)\nsys.stdin.read()\n")
    shell = f"{sys.executable} -m waiting; true"
    with subprocess.Popen(
        ["bash", "-c", shell], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        assert len(ranks(launcher.pid, "waiting")) in (
            1,
            2,
        )  # the one in the background has no stdin and may have ended
        assert launcher.pid not in ranks(launcher.pid, "waiting")
        assert ranks(launcher.pid, "wait") == []


def test_a_lonely_rank_s_clean_pages_do_not_count_and_others_do() -> None:
    rank = {"pss": 900.0, "uss": 700.0, "clean": 300.0, "anonymous": 400.0}
    lonely = {"ranks": 1, "readings": [[rank]]}
    two = {"ranks": 2, "readings": [[rank, {**rank, "uss": 650.0}], [{**rank, "pss": 950.0}, rank]]}
    assert (private(lonely), private(two)) == (400.0, 700.0)
    assert (largest(two, "uss"), total_pss(two)) == (700.0, 1850.0)


def test_the_command_of_several_ranks() -> None:
    command = horovodrun("/somewhere/bin/python", 4, "module", ["--x"])
    assert command == [
        "/somewhere/bin/horovodrun", "--gloo", "-np", "4", "/somewhere/bin/python", "-m", "module", "--x",
    ]  # fmt: skip
