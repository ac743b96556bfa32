"""Each fact of `check` is judged right, on values that were recorded or made up."""

from __future__ import annotations

import pytest

from horovod_trainer import environment
from horovod_trainer.build_facts import CheckBuild, Mpi
from horovod_trainer.environment import Fact

GOOD = CheckBuild("0.28.1", frozenset({"PyTorch"}), frozenset({"MPI", "Gloo"}), frozenset({"MPI", "Gloo"}))
ANOTHER = CheckBuild("0.28.1", frozenset({"TensorFlow"}), frozenset({"Gloo"}), frozenset({"Gloo"}))


def verdicts(facts: list[Fact]) -> list[bool]:
    """Return each fact's ok, having seen that a fix stands exactly where something is not ok."""
    assert all(bool(fact.fix) != fact.ok for fact in facts)
    return [fact.ok for fact in facts]


def test_horovod() -> None:
    assert verdicts(environment.horovod_facts(GOOD, nccl=False)) == [True, True, True]
    assert verdicts(environment.horovod_facts(GOOD, nccl=True)) == [True, True, False]
    assert verdicts(environment.horovod_facts(ANOTHER, nccl=False)) == [False, False, False]
    assert verdicts(environment.horovod_facts(None, nccl=False)) == [False]


@pytest.mark.parametrize(
    ("fact", "ok"),
    [
        (environment.wheel_fact("2.13.0+cpu", "2.13.0+cpu"), True),
        (environment.wheel_fact("2.13.0+cpu", "2.14.0+cpu"), False),
        (environment.wheel_fact(None, None), False),
        (environment.mpi_fact(Mpi("Open MPI", "4.1.4")), True),
        (environment.mpi_fact(Mpi("Open MPI", "5.0.3")), False),
        (environment.mpi_fact(Mpi("MPICH", "5.0.0")), True),
        (environment.mpi_fact(None), False),
        (environment.cuda_fact(None, [], driver=False), True),
        (environment.cuda_fact(None, [], driver=True), False),
        (environment.cuda_fact("12.8", [], driver=True), False),
        (environment.cuda_fact("12.8", ["A100", "A100"], driver=True), True),
        (environment.memlock_fact(8 << 20, rdma=False), True),
        (environment.memlock_fact(8 << 20, rdma=True), False),
        (environment.memlock_fact(environment.UNLIMITED, rdma=True), True),
        (environment.shm_fact(64 << 20, has_gpu=False), True),
        (environment.shm_fact(64 << 20, has_gpu=True), False),
        (environment.shm_fact(0, has_gpu=False), False),
        (environment.open_files_fact(256), False),
        (environment.open_files_fact(1024), True),
        (environment.cores_fact(0.5, 0.5, 8), False),
        (environment.cores_fact(2.0, None, 2), True),
        (environment.bf16_fact(5.2), False),
        (environment.bf16_fact(0.1), True),
    ],
)
def test_verdict(fact: Fact, ok: bool) -> None:
    assert verdicts([fact]) == [ok]


def test_two_nccls_are_a_fault() -> None:
    assert verdicts(environment.nccl_facts("2.27.5", "2.27.5")) == [True, True]
    assert verdicts(environment.nccl_facts("2.27.5", "2.18.3")) == [True, False]


def test_open_mpi_5_names_what_it_ignores() -> None:
    assert "PRTE_MCA_prte_default_hostfile" in environment.mpi_fact(Mpi("Open MPI", "5.0.3")).fix


def test_unknown_distribution() -> None:
    assert verdicts([environment.distribution_fact("no-such-distribution")]) == [False]


@pytest.mark.parametrize(
    ("count", "want"), [(512, "512 B"), (64 << 20, "64 MiB"), (3 << 29, "1.5 GiB"), (2**42, "4 TiB")]
)
def test_size(count: int, want: str) -> None:
    assert environment.size(count) == want


def test_numba_layer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_loads", lambda module: module.endswith("workqueue"))
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    assert environment.numba_fact() == Fact("numba threading layer", "workqueue")
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "tbb")
    assert verdicts([environment.numba_fact()]) == [False]


@pytest.mark.slow
def test_everything_is_collected() -> None:
    facts = environment.collect_facts()
    names = [fact.name for fact in facts]
    assert len(names) == len(set(names))
    assert {"horovod controllers", "MPI", "CUDA", "/dev/shm", "CPU cores", "bf16 on CPU"} <= set(names)
    verdicts(facts)
