"""A few real hosts on this machine: network namespaces on a switch, each with its name, processes and sshd.

Nothing of a bench is outside it, whatever happens: no file, no named namespace, no interface. All of it hangs on one
process, the switch, which ends when the pipe to the Python that made it closes; the kernel then kills the rest.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from horovod_trainer.processes import alive, stat

ROOT = Path(__file__).resolve().parents[2]
# sshd and ip stand where a user's PATH may not look
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
TOOLS = ("bash", "ip", "nsenter", "ssh", "ssh-keygen", "sshd", "tc", "unshare")
GONE_SECONDS = 10.0  # how long a killed process may take to be gone

# Its private /run holds the namespaces' names and the bench's files; `read` returns when Python is gone.
SWITCH = """
set -eu
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 700 /run/bench
echo up
read -r _
"""
# The bench's files are copied through the working directory, which stays what it was below the new /run.
# Users' own ssh settings must decide nothing; ssh finds the bench's in /etc, so that no ~/.ssh need be made.
# sshd is process 1: it reaps orphans (Open MPI's daemons), and the host ends with it, as a worker pod does.
HOST = """
set -eu
hostname "$1"
cd /run/bench
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
cp -pr . /run/bench
cd /
mount --bind /run/bench/hosts /etc/hosts
mount --bind /run/bench/shadow /etc/shadow
mount --bind /run/bench/ssh_config /etc/ssh/ssh_config
[ ! -d ~root/.ssh ] || mount -t tmpfs -o mode=700 tmpfs ~root/.ssh
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
"$2" -t -f /run/bench/sshd_config
(until [ -e /run/sshd.pid ]; do sleep 0.01; done; echo up) &
exec "$2" -D -f /run/bench/sshd_config -E /run/bench/sshd.log
"""
# Open MPI names its session folder by host name and process number, which two benches share: each host has its own.
ENVIRONMENT = {"OMPI_MCA_orte_tmpdir_base": "/run/bench"}
SSH_CONFIG = """\
Host *
    IdentityFile /run/bench/key
    IdentitiesOnly yes
    IdentityAgent none
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
SSHD_CONFIG = f"""\
HostKey /run/bench/host_key
AuthorizedKeysFile /run/bench/key.pub
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
SetEnv {" ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())}
"""


def available() -> str | None:
    """Return why hosts cannot be made here, or None; in CI there is no excuse: raise instead."""
    reason = _obstacle()
    if reason and os.environ.get("CI") == "true":
        raise RuntimeError(f"CI must be able to make hosts: {reason}")
    return reason


def mpirun_on(hosts: Sequence[str], slots: int, command: Sequence[str], passed: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `slots` ranks on each named host, to be started on the first.

    `passed` names variables that ranks on the other hosts shall have too, or sets them (NAME=value).
    """
    # many ranks on few cores: one that waits must give its core to one that computes
    polite = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    network = ["--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
    plain = ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]  # UCX and verbs look for devices that are not there
    always = ["PATH", "PYTHONPATH", "HOROVOD_GLOO_IFACE=eth0", "GLOO_SOCKET_IFNAME=eth0"]
    where = ["--host", ",".join(f"{host}:{slots}" for host in hosts), "-np", str(slots * len(hosts))]
    exports = [word for name in [*always, *passed] for word in ("-x", name)]
    return ["mpirun", "--allow-run-as-root", *where, *polite, *network, *plain, *exports, *command]


class HostProcess(subprocess.Popen[str]):
    """A command inside a host; signals reach the command, not the nsenter that waits for it."""

    def send_signal(self, sig: int) -> None:
        while self.poll() is None:
            if children := _children(self.pid):
                os.kill(children[0], sig)
                return
            time.sleep(0.005)  # not started yet


class Hosts:
    """`count` hosts named host0, host1, ... within a `with` block; they share this machine's files and /tmp."""

    def __init__(self, count: int) -> None:
        """Name the hosts; entering the block makes them."""
        self.names = [f"host{n}" for n in range(count)]
        self._wrappers: list[subprocess.Popen[str]] = []
        self._started: list[HostProcess] = []
        self._inits: list[int] = []
        self._switch = 0

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(
        self,
        n: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> HostProcess:
        """Start a command on host `n`, in the project's root, with `env` added to this environment."""
        if not alive(self._inits[n]):
            raise RuntimeError(f"{self.names[n]} is down")
        enter = [_tool("nsenter"), "--target", str(self._inits[n])]
        enter += ["--mount", "--uts", "--ipc", "--net", "--pid", "--", "env", "-C", str(ROOT)]
        process = HostProcess(
            [*enter, *argv],
            env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C is the test's to handle
        )
        self._started.append(process)
        return process

    def run(
        self, n: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on host `n` to its end; kill it and raise TimeoutExpired when it takes longer."""
        with self.start(n, argv, env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill(self, n: int) -> None:
        """Kill every process of host `n` at once; its address still answers, with refusals (see also cut)."""
        if alive(self._inits[n]):
            os.kill(self._inits[n], signal.SIGKILL)
        self._wrappers[1 + n].wait(GONE_SECONDS)

    def cut(self, n: int) -> None:
        """Pull host `n`'s cable: packets vanish silently, and the host itself sees that its link is down."""
        self._ip(f"link set port{n} down")

    def mend(self, n: int) -> None:
        """Plug host `n`'s cable in again."""
        self._ip(f"link set port{n} up")

    def limit(self, n: int, rate: str) -> None:
        """Limit host `n`'s network to a rate such as 20mbit, each way."""
        shape = f"root tbf rate {rate} burst 32kb latency 400ms"
        self._inside("tc", "-batch", "-", text=f"qdisc replace dev port{n} {shape}\n")
        self._inside("tc", "-n", self.names[n], "-batch", "-", text=f"qdisc replace dev eth0 {shape}\n")

    def pids(self, n: int, pattern: str) -> list[int]:
        """Return the processes of host `n` whose command line matches, by their numbers outside the host."""
        home = _namespace(self._inits[n])
        return [
            pid for pid in _processes() if home and _namespace(pid) == home and re.search(pattern, _command_line(pid))
        ]

    def wait_for(self, n: int, pattern: str, timeout: float = 30.0) -> list[int]:
        """Return what `pids` does as soon as there is any; raise TimeoutError when there is none in time."""
        end = time.monotonic() + timeout
        while not (found := self.pids(n, pattern)):
            if time.monotonic() > end:
                raise TimeoutError(f"no process {pattern!r} on {self.names[n]} within {timeout:g} s")
            time.sleep(0.01)
        return found

    def _make(self) -> None:
        apart = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        wrapper = self._spawn([_tool("unshare"), "--net", *apart, "bash", "-c", SWITCH])
        _await_up(wrapper, "the switch")
        self._switch = _children(wrapper.pid)[0]
        self._write_files(Path(f"/proc/{self._switch}/root/run/bench"))
        self._connect()
        enter = [_tool("nsenter"), "--target", str(self._switch), "--mount", "--pid", "--"]
        for name in self.names:
            own = [_tool("nsenter"), f"--net=/run/netns/{name}", _tool("unshare"), "--uts", "--ipc", *apart]
            self._spawn([*enter, *own, "bash", "-c", HOST, "bash", name, _tool("sshd")])
        for name, wrapper in zip(self.names, self._wrappers[1:], strict=True):
            _await_up(wrapper, name)
            self._inits.append(_children(_children(wrapper.pid)[0])[0])

    def _spawn(self, argv: list[str]) -> subprocess.Popen[str]:
        # The switch must have the only pipe that counts: children of this process inherit none of it.
        wrapper = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": SEARCH},
            start_new_session=True,
        )
        self._wrappers.append(wrapper)
        return wrapper

    def _write_files(self, folder: Path) -> None:
        for name in ("key", "host_key"):
            make = [_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(make, check=True)
        lines = ["127.0.0.1 localhost", *(f"{_address(n)} {name}" for n, name in enumerate(self.names))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "ssh_config").write_text(SSH_CONFIG)
        (folder / "sshd_config").write_text(SSHD_CONFIG)
        # Without PAM sshd refuses an account whose password is locked by `!`, as Ubuntu's root is.
        shadow = re.sub(r"^root:[^:]*:", "root:*:", Path("/etc/shadow").read_text(), flags=re.MULTILINE)
        (folder / "shadow").touch(0o600)
        (folder / "shadow").write_text(shadow)

    def _connect(self) -> None:
        lines = ["link add name switch type bridge", "link set switch up"]
        for n, name in enumerate(self.names):
            lines += [
                f"netns add {name}",
                f"link add name port{n} type veth peer name eth0 address {_hardware(n)} netns {name}",
                f"link set port{n} master switch up",
            ]
        self._ip(*lines)
        for n, name in enumerate(self.names):
            # Neighbours are fixed, so that a cut host is silent, as it is behind routers, and not "no route to host".
            others = [other for other in range(len(self.names)) if other != n]
            known = [f"neigh add {_address(o)} lladdr {_hardware(o)} dev eth0 nud permanent" for o in others]
            address = f"address add {_address(n)}/24 dev eth0"
            self._ip("link set lo up", "link set eth0 up", address, *known, host=name)

    def _ip(self, *lines: str, host: str | None = None) -> None:
        self._inside("ip", *(["-n", host] if host else []), "-batch", "-", text="\n".join(lines) + "\n")

    def _inside(self, tool: str, *arguments: str, text: str) -> None:
        enter = [_tool("nsenter"), "--target", str(self._switch), "--mount", "--net", "--pid", "--"]
        done = subprocess.run(
            [*enter, _tool(tool), *arguments],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stdout.strip()}\n{text}")

    def _end(self) -> None:
        for wrapper in self._wrappers:
            for pipe in (wrapper.stdin, wrapper.stdout):
                if pipe:
                    pipe.close()
        for process in [*self._wrappers, *self._started]:
            try:
                process.wait(GONE_SECONDS)
            except subprocess.TimeoutExpired:
                # Never seen; then the wrappers, whose children die with them, end it the hard way.
                subprocess.Popen.kill(process)
                process.wait(GONE_SECONDS)


def _obstacle() -> str | None:
    if not sys.platform.startswith("linux"):
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (openssh-server, openssh-client, iproute2, util-linux)"
    probe = (
        f"mount -t tmpfs tmpfs /run && {_tool('ip')} link add name a type bridge && {_tool('ip')} link add type veth"
    )
    apart = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([_tool("unshare"), *apart, "bash", "-c", probe], capture_output=True, text=True, check=False)
    return f"this machine allows no hosts: {tried.stderr.strip()}" if tried.returncode != 0 else None


@functools.cache
def _tool(name: str) -> str:
    path = shutil.which(name, path=SEARCH)
    if path is None:
        raise RuntimeError(f"{name} is not installed")
    return path


def _await_up(wrapper: subprocess.Popen[str], what: str) -> None:
    assert wrapper.stdout is not None
    said = []
    for line in wrapper.stdout:
        if line == "up\n":
            return
        said.append(line)
    raise RuntimeError(f"{what} did not start: {''.join(said).strip()}")


def _address(n: int) -> str:
    return f"10.86.0.{n + 1}"


def _hardware(n: int) -> str:
    return f"02:00:0a:56:00:{n + 1:02x}"


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _children(pid: int) -> list[int]:
    return [child for child in _processes() if stat(child)[1:2] == [str(pid)]]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
