"""The front: starts mpirun, horovodrun or torchrun, passes the wish to stop on, and says how the job really ended (L4).

mpirun kills its ranks a second after SIGTERM but hands SIGUSR1 on to them; horovodrun ends with code 1 and a traceback
whatever its ranks returned; neither ends for sure when the link to a host is cut. The front knows all that, so that its
own signals, exit code and last lines mean the same under each.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from horovod_trainer import processes
from horovod_trainer.console import counted, get_logger
from horovod_trainer.documents import make_folder
from horovod_trainer.errors import Conflict, ExitCode, InvalidInput, NotFound, Problem
from horovod_trainer.exit_note import FOLDER_VARIABLE, ExitNote, read_note
from horovod_trainer.processes import JOB, TRY

OPEN_MPI = ("mpirun", "mpiexec", "orterun")
# A host that falls silent is noticed after 30 s, not after Open MPI's 480, and not for a switch that restarts.
KEEPALIVE = {
    "OMPI_MCA_oob_tcp_keepalive_time": "10",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "5",
    "OMPI_MCA_oob_tcp_keepalive_probes": "4",
}
HOST_LOST = (205, 255)  # what mpirun returns when a daemon of its own on another host is gone
PASSED_ON = (FOLDER_VARIABLE, JOB, TRY)  # mpirun gives ranks on other hosts only what it is told to
POLL_SECONDS = 0.1
SECOND_AFTER = 1.0  # seconds of silence, after which a signal is a second wish
FAILED_GRACE = 2.0  # from a rank's last words to the launcher's own end; then it waits for somebody who is gone
STOPPED_GRACE = 30.0  # all ranks write nothing more by then: the checkpoint is committed before the note

log = get_logger()


@dataclass(frozen=True)
class Ending:
    """How a job ended: the exit code, and the sentences to print first (none when all is well)."""

    code: int
    sentences: tuple[str, ...] = ()


class Front:
    """One try of a job: the launcher's process, and what this host's processes of the same try are asked to do."""

    def __init__(self, argv: Sequence[str], exit_dir: Path | None, job: str | None) -> None:
        """Check what is to be started; raises InvalidInput and NotFound."""
        if not argv:
            raise InvalidInput(Problem("launch", "give the launcher's command after --: launch -- mpirun -np 2 ..."))
        if shutil.which(argv[0]) is None:
            raise NotFound(Problem(argv[0], "no such command; is it installed, and on the PATH?"))
        self.argv, self.exit_dir = list(argv), exit_dir
        self.open_mpi = Path(argv[0]).name in OPEN_MPI
        self.job = job or _identity(argv)
        self.attempt = secrets.token_hex(8)
        self.asked = 0  # how often it was asked to stop
        self._heard_at = float("-inf")

    def run(self) -> Ending:
        """Start the launcher, wait for its end, and return how the job ended; no process of this try is left here.

        Raises Conflict while the same job runs on this host.
        """
        with alone(self.job), _exit_folder(self.exit_dir) as folder, self._listening():
            ours = {FOLDER_VARIABLE: str(folder), JOB: self.job, TRY: self.attempt}
            env = {**KEEPALIVE, **os.environ, **ours}
            exports = [word for name in PASSED_ON for word in ("-x", name)] if self.open_mpi else []
            command = [self.argv[0], *exports, *self.argv[1:]]
            # a session of its own: Ctrl-C reaches the front alone, which turns it into a clean stop
            self.child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                code = self._wait(folder)
            finally:
                processes.end(self._mine(), grace=0.0)  # what an orphaned launcher left
                self.child.wait()
            return ending(code, read_note(folder), asked=bool(self.asked))

    def _wait(self, folder: Path) -> int:
        """Return the launcher's exit code, minus a signal's number; it is ended itself when it outlives its ranks' end."""
        heard, deadline = 0, float("inf")
        while (code := self.child.poll()) is None:
            if self.asked > heard:
                heard = self.asked
                self._pass_on(impatient=heard > 1)
            note = read_note(folder) if deadline == float("inf") else None
            if note is not None:
                deadline = time.monotonic() + (STOPPED_GRACE if note.code == ExitCode.STOPPED else FAILED_GRACE)
            if time.monotonic() > deadline:
                log.warning("%s does not end by itself: ending it", Path(self.argv[0]).name)
                processes.end(self._mine(), grace=0.0)  # SIGTERM crashes an mpirun that is already ending
                return self.child.wait()
            time.sleep(POLL_SECONDS)
        return code

    def _pass_on(self, impatient: bool) -> None:
        """Ask the ranks to stop, by SIGUSR1 where it is heard; the second time end them."""
        mine = self._mine()
        if impatient:
            log.warning("asked again: ending %s at once", counted(len(mine), "process", "processes"))
            processes.end(mine, grace=1.0)
            return
        log.warning("asked to stop: the ranks finish the step and save a checkpoint; ask again to end at once")
        ranks = [process for process in mine if process.catches(signal.SIGUSR1) and process.pid != self.child.pid]
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        if self.open_mpi:  # for the other hosts' ranks; one wish heard twice is one wish
            self.child.send_signal(signal.SIGUSR1)
        elif not ranks:  # all on other hosts, or not yet listening
            self.child.terminate()

    def _mine(self) -> list[processes.Process]:
        found = processes.processes()
        below = {p.pid: p for p in processes.descendants(os.getpid(), found)}
        return list({**below, **{p.pid: p for p in processes.of_try(self.job, self.attempt, found)}}.values())

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def hear(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if now - self._heard_at > SECOND_AFTER:  # a closing session sends SIGTERM and SIGHUP at once
                self.asked += 1
            self._heard_at = now

        # SIGHUP: the terminal was closed, and nobody would be left to end the ranks
        heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, hear) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def ending(code: int, note: ExitNote | None, asked: bool) -> Ending:
    """Return how a job ended, from its launcher's exit code (minus a signal's number), the first rank's note, and the wish.

    A note counts more than the launcher's code: horovodrun's is 1 for everything. A launcher that ended well although a
    rank did not is not believed.
    """
    if note is not None:
        return Ending(
            note.code, tuple(f"rank {note.rank} on {note.host}: {line}" for line in note.sentence.splitlines())
        )
    if code == 0:
        return Ending(0)
    if asked:  # the ranks had not begun to listen, or were ended on the second wish
        sentence = (
            "ended before a rank could say more; train --resume auto goes on from the last checkpoint, if there is one"
        )
        return Ending(ExitCode.STOPPED, (sentence,))
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    guess = "a host was lost" if code in HOST_LOST else "killed, perhaps out of memory, or never started"
    sentence = f"the launcher ended with {name}, and no rank said why: {guess}"
    return Ending(128 - code if code < 0 else code, (sentence,))


@contextmanager
def alone(job: str) -> Iterator[None]:
    """Hold the job's lock on this host; raises Conflict while another front has it: its ranks are at work, not left over."""
    digest = hashlib.sha256(f"{job} {socket.gethostname()}".encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"horovod-trainer-{os.getuid()}-{digest}.lock"
    with open(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"the same job is running here, started by process {file.read().strip()}"
            raise Conflict(Problem("--job", message, job)) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def end_earlier_tries(environment: Mapping[str, str] = os.environ) -> int:
    """End what earlier tries of this job left on this host, and return how many processes; a host's first rank calls it.

    A launcher that was killed, or cut off, leaves ranks that wait for it and hold GPUs, ports and memory.
    """
    job, attempt = environment.get(JOB), environment.get(TRY)
    if not job or not attempt:
        return 0
    found = processes.processes()
    stale = processes.of_earlier_tries(job, attempt, found)
    if stale:
        pids = ", ".join(str(process.pid) for process in stale)
        log.warning(
            "an earlier try of this job left %s here: ending %s", counted(len(stale), "process", "processes"), pids
        )
        processes.end(stale)
    return len(stale)


def _identity(argv: Sequence[str]) -> str:
    """Return what makes two calls the same job where it was given no name: command, folder and user."""
    return hashlib.sha256("\0".join([*argv, os.getcwd(), getpass.getuser()]).encode()).hexdigest()[:16]


@contextmanager
def _exit_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield a folder for this try's exit.json, and remove it: below the one named, which all hosts share, or this host's own.

    A folder a try: ranks that an earlier one left may still have something to say, and it is not about this one.
    """
    if wanted is not None:
        make_folder(wanted)
    with tempfile.TemporaryDirectory(prefix="horovod-trainer-", dir=wanted and wanted.absolute()) as folder:
        yield Path(folder)
