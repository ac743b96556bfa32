"""The front: what it starts, how it passes the wish to stop on, and which end it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_trainer.errors import Conflict, ExitCode
from horovod_trainer.exit_note import FOLDER_VARIABLE, NAME, ExitNote, leave_note, read_note
from horovod_trainer.launch import Ending, alone, end_earlier_tries, ending
from horovod_trainer.processes import (
    JOB,
    TRY,
    Process,
    alive,
    descendants,
    of_earlier_tries,
    of_try,
    processes,
)
from tests.commands import ROOT, refuse

# how a job ended

DIVERGED = ExitNote(3, "host-b", 7, "the loss is not finite\nlower optim.lr")
STOPPED = ExitNote(0, "host-a", 75, "ended after step 9")


@pytest.mark.parametrize(
    ("code", "note", "asked", "expected"),
    [
        (0, None, False, 0),
        (0, None, True, 0),  # asked too late: it had come to its end
        (1, DIVERGED, False, 7),  # horovodrun says 1 for everything
        (7, DIVERGED, False, 7),
        (0, DIVERGED, False, 7),  # a launcher that ended well although a rank did not is not believed
        (1, STOPPED, True, 75),
        (137, None, False, 137),
        (-9, None, False, 137),
        (-15, None, True, 75),  # ended before the ranks listened
        (1, None, True, 75),
        (6, None, False, 6),  # mpirun returns the rank's code
    ],
)
def test_the_end_of_a_job(code: int, note: ExitNote | None, asked: bool, expected: int) -> None:
    ended = ending(code, note, asked)
    assert ended.code == expected
    assert bool(ended.sentences) == (expected != 0)


def test_the_ranks_own_sentences_are_reported_with_rank_and_host() -> None:
    assert ending(1, DIVERGED, False) == Ending(
        7, ("rank 3 on host-b: the loss is not finite", "rank 3 on host-b: lower optim.lr")
    )
    assert "signal SIGKILL" in ending(-9, None, False).sentences[0]


# exit.json


def test_the_first_rank_to_fail_is_heard(tmp_path: Path) -> None:
    where = {FOLDER_VARIABLE: str(tmp_path)}
    assert read_note(tmp_path) is None
    leave_note(7, "first", where)
    leave_note(1, "second, a consequence", where)
    note = read_note(tmp_path)
    assert note is not None
    assert (note.code, note.sentence, note.rank) == (7, "first", 0)
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_without_a_front_or_a_folder_nothing_is_written_and_nothing_fails(tmp_path: Path) -> None:
    leave_note(1, "alone", {})
    leave_note(1, "folder is gone", {FOLDER_VARIABLE: str(tmp_path / "gone")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 1}', "null"])
def test_a_note_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    assert read_note(tmp_path) is None


# the processes of a host


def process(pid: int, parent: int, job: str = "", attempt: str = "") -> Process:
    given = {JOB: job, TRY: attempt}
    return Process(pid, parent, {name: value for name, value in given.items() if value}, 0)


TREE = [process(2, 1), process(3, 2, "j", "a"), process(4, 3, "j", "a"), process(9, 1, "j", "b"), process(10, 9, "k", "c"),
        process(11, 1, "j")]  # fmt: skip


def test_descendants_and_tries() -> None:
    assert {p.pid for p in descendants(2, TREE)} == {3, 4}
    assert {p.pid for p in of_try("j", "a", TREE)} == {3, 4}
    assert {p.pid for p in of_earlier_tries("j", "a", TREE)} == {9}
    assert of_earlier_tries("other", "a", TREE) == []


def test_this_machines_processes_are_read() -> None:
    marked = {**os.environ, JOB: "test-job", TRY: "test-try"}
    program = "import signal, sys; signal.signal(10, print); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], env=marked, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (found,) = of_try("test-job", "test-try", processes())
        assert (found.pid, found.parent) == (child.pid, os.getpid())
        assert found.catches(signal.SIGUSR1)
        assert not found.catches(signal.SIGTERM)
        child.kill()
    assert of_try("test-job", "test-try", processes()) == []


def test_what_an_earlier_try_left_is_ended_and_nothing_else() -> None:
    deaf = "import signal, sys; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    children = []
    for job, attempt in (("job-x", "old"), ("job-x", "new"), ("job-y", "old")):
        env = {**os.environ, JOB: job, TRY: attempt}
        children.append(subprocess.Popen([sys.executable, "-c", deaf], env=env, stdout=subprocess.PIPE, text=True))
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        assert end_earlier_tries({JOB: "job-x", TRY: "new"}) == 1
        assert [child.poll() for child in children] == [-signal.SIGKILL, None, None]
        assert end_earlier_tries({}) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]  # a pipe was asked for


# the front itself, with launchers of our own


def front(*command: str, exit_dir: Path | None = None, job: str | None = None) -> subprocess.Popen[str]:
    options = (["--exit-dir", str(exit_dir)] if exit_dir else []) + (["--job", job] if job else [])
    argv = [sys.executable, "-m", "horovod_trainer", "launch", *options, "--", *command]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def script(folder: Path, name: str, body: str) -> str:
    """Return a program that plays a launcher or rank."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n{body}")
    file.chmod(0o755)
    return str(file)


RANK = """
def stop(*_):
    from horovod_trainer.exit_note import leave_note
    leave_note(75, "saved")
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_command_that_is_not_there_and_none_at_all() -> None:
    assert "no such command" in refuse(3, "launch", "--", "mpirun-of-nobody", "-np", "2")
    assert "Missing argument" in refuse(2, "launch")


def test_exit_codes_and_output_pass_through(tmp_path: Path) -> None:
    done = front("sh", "-c", "echo out; echo err >&2; exit 6")
    out, err = done.communicate(timeout=30)
    assert (done.returncode, out) == (6, "out\n")
    assert err.splitlines()[0] == "err"
    assert "error: the launcher ended with code 6" in err
    done = front("true")
    assert done.communicate(timeout=30) == ("", "")
    assert done.returncode == 0


def test_a_rank_that_fails_under_a_launcher_that_hides_it(tmp_path: Path) -> None:
    body = "from horovod_trainer.exit_note import leave_note\nleave_note(7, 'the loss is not finite')\nsys.exit(1)"
    done = front(script(tmp_path, "launcher", body))
    _, err = done.communicate(timeout=30)
    assert done.returncode == ExitCode.DIVERGED
    assert err.splitlines()[-1].endswith(": the loss is not finite")


def test_sigterm_reaches_ranks_that_listen_and_not_the_shell_between(tmp_path: Path) -> None:
    shell = ["sh", "-c", f"{script(tmp_path, 'rank', RANK)}; exit 1"]
    launcher = script(tmp_path, "horovodrun", f"sys.exit(subprocess.call({shell}))")
    running = front(launcher)
    assert running.stdout is not None
    assert running.stdout.readline().startswith("ready")
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=30)
    assert running.returncode == ExitCode.STOPPED
    assert err.splitlines()[-1].startswith("stopped: rank 0 on ")


def test_open_mpi_is_told_what_to_pass_on_and_hears_sigusr1(tmp_path: Path) -> None:
    body = "print(json.dumps(sys.argv[1:]), flush=True)\n" + RANK
    running = front(script(tmp_path, "mpirun", body), "-np", "2")
    assert running.stdout is not None
    words = json.loads(running.stdout.readline())
    assert words == ["-x", FOLDER_VARIABLE, "-x", JOB, "-x", TRY, "-np", "2"]
    running.stdout.readline()
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=30)
    assert running.returncode == ExitCode.STOPPED


def test_a_launcher_that_outlives_its_ranks_is_ended(tmp_path: Path) -> None:
    body = (
        "from horovod_trainer.exit_note import leave_note\nleave_note(124, 'no progress')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    began = time.monotonic()
    running = front(script(tmp_path, "mpirun", body))
    out, err = running.communicate(timeout=30)
    assert running.returncode == ExitCode.TIMEOUT
    assert time.monotonic() - began < 3.0 + 5.0
    assert "does not end by itself" in err
    assert not alive(int(out))


def test_asked_twice_ends_what_does_not_listen_and_its_orphans(tmp_path: Path) -> None:
    orphan = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    deaf = "signal.signal(10, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    body = f"{deaf}\nchild = {orphan}\nprint(child.pid, flush=True)\ntime.sleep(60)"
    running = front(script(tmp_path, "mpirun", body))
    assert running.stdout is not None
    pid = int(running.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closing session: one wish, not two
        running.send_signal(number)
    time.sleep(1.5)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == ExitCode.STOPPED
    assert not alive(pid)


def test_what_an_earlier_try_says_late_is_not_about_this_one(tmp_path: Path) -> None:
    """Ranks that were left are asked to stop when the next try begins, and leave their note where that one looks."""
    body = "print(os.environ['HOROVOD_TRAINER_EXIT_DIR'], flush=True)\ntime.sleep(1)"
    shared = tmp_path / "shared"
    first = front(script(tmp_path, "first", body), exit_dir=shared)
    second = front(script(tmp_path, "second", body), exit_dir=shared)
    places = [Path(running.stdout.readline().strip()) for running in (first, second) if running.stdout is not None]
    assert places[0] != places[1]
    assert all(place.parent == shared for place in places)
    leave_note(124, "no progress", {FOLDER_VARIABLE: str(places[0])})
    for running, code in ((first, 124), (second, 0)):
        running.communicate(timeout=30)
        assert running.returncode == code
    leave_note(124, "too late", {FOLDER_VARIABLE: str(places[0])})
    assert list(shared.iterdir()) == []


def test_the_same_job_twice_on_a_host_is_refused_while_the_first_is_at_work() -> None:
    name = f"a job of test process {os.getpid()}"
    said = f"the same job is running here, started by process {os.getpid()}"
    with alone(name), alone(f"{name}, another"), pytest.raises(Conflict, match=said), alone(name):
        pass
    with alone(name):
        pass
    fronts = [front("sleep", "2", job=f"{name}, real") for _ in range(4)]
    ends = [running.communicate(timeout=30)[1] for running in fronts]
    assert sorted(running.returncode for running in fronts) == [0, 4, 4, 4], ends
