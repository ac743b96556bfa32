"""Bytes changed at random in what users give and in what was saved: an exit code of ours, never a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import bad_inputs
from tests.bad_inputs import npz, small
from tests.commands import Ended, run

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Change = tuple[str, int, bytes]
changes = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "zero"]), st.integers(0, 2**20), st.binary(min_size=1, max_size=9)),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("fuzzed") / "here"
    shutil.copytree(bad_inputs.good(), place)
    yield place
    shutil.rmtree(bad_inputs.good())
    bad_inputs.good.cache_clear()


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def changed(content: bytes, how: list[Change]) -> bytes:
    """Return the content with every change made."""
    for kind, at, some in how:
        at %= max(1, len(content))
        if kind == "flip":
            content = (
                content[:at]
                + bytes(a ^ b for a, b in zip(content[at:], some, strict=False))
                + content[at + len(some) :]
            )
        elif kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + some + content[at:]
        else:
            content = content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :]
    return content


def is_in_order(ended: Ended) -> None:
    assert ended.code in (0, 2, 3, 4, 7), ended
    assert bool(ended.errors) == (ended.code != 0), ended


@few
@given(how=changes)
def test_a_config(folder: Path, how: list[Change]) -> None:
    (folder / "c.yaml").write_bytes(changed((folder / "small.yaml").read_bytes(), how))
    is_in_order(run("config", "-c", folder / "c.yaml"))


@few
@given(how=changes)
def test_an_archive(folder: Path, how: list[Change]) -> None:
    good = (folder / "raw" / "g.npz").read_bytes()
    try:
        (folder / "raw" / "g.npz").write_bytes(changed(good, how))
        is_in_order(run(*npz(folder)))
    finally:
        (folder / "raw" / "g.npz").write_bytes(good)
        shutil.rmtree(folder / "new", ignore_errors=True)


@few
@given(
    how=changes, name=st.sampled_from(["manifest.json", "indptr.npy", "indices.npy", "features.npy", "valid_edge.npy"])
)
def test_a_store(folder: Path, how: list[Change], name: str) -> None:
    file = folder / "store" / name
    good = file.read_bytes()
    try:
        file.write_bytes(changed(good, how))
        ended = run("verify", folder / "store")
        is_in_order(ended)
        if file.read_bytes() != good and name != "manifest.json":
            assert ended.code == 2
    finally:
        file.write_bytes(good)


@few
@given(how=changes, name=st.sampled_from(["LATEST", "state.json", "model.safetensors", "optimizer.safetensors"]))
def test_a_checkpoint(folder: Path, how: list[Change], name: str) -> None:
    shutil.copytree(folder / "run", folder / "stopped")
    try:
        (folder / "stopped" / "result.json").unlink()
        (file,) = (folder / "stopped" / "checkpoints").rglob(name)
        file.write_bytes(changed(file.read_bytes(), how))
        is_in_order(run(*small("train", folder, f"output.dir={folder / 'stopped'}", "output.tensorboard=false")))
    finally:
        for place in folder.glob("stopped*"):
            shutil.rmtree(place)
