"""The bench of hosts itself: what every test of faults between hosts stands on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_trainer.processes import alive
from tests.hosts import bench
from tests.hosts.bench import ROOT, Hosts, available, mpirun_on

NO_HOSTS = available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS)),
]
IDLE = ["sleep", "1000"]
# one write a line: unbuffered, print's pieces mix with another rank's
ALLREDUCE = r"""
import socket, sys, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
sys.stdout.write(f"{socket.gethostname()} {hvd.rank()} {hvd.size()} {hvd.local_size()} {total.item()}\n")
"""
OWNER = """
import sys, time
from tests.hosts.bench import Hosts
with Hosts(2) as hosts:
    hosts.start(1, ["sleep", "1000"])
    print(*hosts.pids(0, "sshd"), *hosts.wait_for(1, "^sleep"), flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def connects(hosts: Hosts, source: int, target: int) -> str:
    """Return what a TCP connection to sshd comes to."""
    dial = f"import socket; socket.create_connection(('host{target}', 22), 1).close()"
    done = hosts.run(source, [sys.executable, "-c", dial])
    return "connected" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def own_namespaces(pids: list[int]) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in ("net", "mnt", "pid", "uts", "ipc")}


def all_namespaces() -> set[str]:
    found = set()
    for pid in bench._processes():
        try:
            found |= own_namespaces([pid])
        except OSError:
            continue  # has just ended
    return found


def interfaces() -> str:
    return subprocess.run([bench._tool("ip"), "-brief", "link"], capture_output=True, text=True, check=True).stdout


def test_each_host_has_its_name_its_address_and_its_own_processes(hosts: Hosts) -> None:
    for n in range(3):
        assert hosts.run(n, ["hostname"]).stdout == f"host{n}\n"
        assert hosts.run(0, ["ssh", f"host{n}", "hostname"]).stdout == f"host{n}\n"
        hosts.start(n, IDLE)
    assert "10.86.0.2" in hosts.run(2, ["getent", "hosts", "host1"]).stdout
    sleepers = {pid for n in range(3) for pid in hosts.wait_for(n, "^sleep 1000$")}
    assert len(sleepers) == 3
    assert hosts.run(1, ["sh", "-c", "cat /proc/*/cmdline | tr -d '\\0'"]).stdout.count("sleep1000") == 1
    assert hosts.run(1, ["sh", "-c", "touch /dev/shm/own /run/own"]).returncode == 0
    assert hosts.run(2, ["ls", "/dev/shm"]).stdout == ""


def test_three_hosts_are_up_in_two_seconds() -> None:
    start = time.monotonic()
    with Hosts(3):
        assert time.monotonic() - start < 2.0


def test_commands_return_what_they_are(hosts: Hosts) -> None:
    done = hosts.run(1, ["sh", "-c", "echo $WORD; echo no >&2; pwd; exit 75"], {"WORD": "yes"})
    assert (done.stdout, done.stderr, done.returncode) == (f"yes\n{ROOT}\n", "no\n", 75)
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(1, IDLE, timeout=0.2)
    assert hosts.pids(1, "sleep") == []


def test_a_signal_reaches_the_command(hosts: Hosts) -> None:
    process = hosts.start(0, ["bash", "-c", "trap 'exit 7' USR1; echo ready; while :; do sleep 0.05; done"])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(5) == 7
    process = hosts.start(0, IDLE)
    process.kill()
    assert process.wait(5) == -signal.SIGKILL


def test_mpirun_reaches_every_host(hosts: Hosts) -> None:
    done = hosts.run(0, mpirun_on(hosts.names, 1, ["hostname"]))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == hosts.names
    assert hosts.pids(1, "orted") == []


@pytest.mark.parametrize("slots", [1, 2])
def test_ranks_on_two_hosts_add_their_numbers(hosts: Hosts, slots: int) -> None:
    done = hosts.run(0, mpirun_on(hosts.names[:2], slots, [sys.executable, "-c", ALLREDUCE], ["OMP_NUM_THREADS=1"]))
    assert done.returncode == 0, done.stderr
    size = 2 * slots
    total = size * (size + 1) / 2
    want = [f"host{rank // slots} {rank} {size} {slots} {total}" for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == want


def test_a_cut_host_is_silent_until_it_is_mended(hosts: Hosts) -> None:
    assert connects(hosts, 0, 1) == "connected"
    hosts.cut(1)
    assert connects(hosts, 0, 1) == "TimeoutError: timed out"
    assert connects(hosts, 1, 0) == "TimeoutError: timed out"
    assert connects(hosts, 0, 2) == "connected"
    hosts.mend(1)
    assert connects(hosts, 0, 1) == "connected"


def test_a_killed_host_is_gone(hosts: Hosts) -> None:
    inside = hosts.start(2, IDLE)
    hosts.wait_for(2, "^sleep")
    hosts.kill(2)
    assert inside.wait(5) == -signal.SIGKILL
    assert hosts.pids(2, "") == []
    assert "Connection refused" in hosts.run(0, ["ssh", "host2", "true"]).stderr
    with pytest.raises(RuntimeError, match="host2 is down"):
        hosts.start(2, IDLE)
    hosts.kill(2)
    assert connects(hosts, 0, 1) == "connected"


def test_a_network_is_as_slow_as_told(hosts: Hosts) -> None:
    copy = ["sh", "-c", "head -c 2000000 /dev/zero | ssh host1 'cat > /dev/null'"]
    hosts.limit(1, "20mbit")
    start = time.monotonic()
    assert hosts.run(0, copy).returncode == 0
    assert 0.6 < time.monotonic() - start < 5  # 0.8 s of data


def test_nothing_is_left_after_the_block() -> None:
    before = all_namespaces()
    links = interfaces()
    pids, spaces = [], set()

    def fail(hosts: Hosts) -> None:
        hosts.start(1, IDLE)
        pids.extend([*hosts.wait_for(1, "^sleep"), *hosts.pids(0, "sshd")])
        spaces.update(own_namespaces(pids))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        fail(hosts)
    assert len(pids) == 2
    assert spaces
    assert spaces.isdisjoint(before)
    assert spaces.isdisjoint(all_namespaces())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert interfaces() == links


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SSHD_CONFIG", bench.SSHD_CONFIG + "Nonsense yes\n")
    with pytest.raises(RuntimeError, match=r"host0 did not start.*Nonsense"), Hosts(2):
        pass
    assert not any("/run/bench" in bench._command_line(pid) for pid in bench._children(os.getpid()))


def test_a_killed_owner_takes_its_hosts_along() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def test_two_benches_stand_side_by_side() -> None:
    with Hosts(2) as one, Hosts(2) as two:
        started = [made.start(0, mpirun_on(made.names, 1, ["hostname"])) for made in (one, two)]
        for process in started:
            out, err = process.communicate(timeout=60)
            assert sorted(out.split()) == ["host0", "host1"], err


def test_in_ci_a_missing_tool_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOOLS", ("no-such-tool",))
    monkeypatch.delenv("CI", raising=False)
    assert "not installed: no-such-tool" in str(available())
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="no-such-tool"):
        available()
