"""A small graph, its store and a finished run, for the tests of the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import SMALL, run


@pytest.fixture
def _threads_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what `train` sets is put back


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small.yaml, its store and a finished run; tests copy what they damage."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.yaml").write_text(
        SMALL.replace("STORE", str(folder / "store")).replace("RUN", str(folder / "run"))
    )
    for command in ("prepare", "train"):
        ended = run(command, "-c", folder / "small.yaml")
        assert ended.code == 0, ended.err
        (folder / f"{command}.out").write_text(ended.out)
    return folder


@pytest.fixture
def small(made: Path, tmp_path: Path) -> Callable[..., list[object]]:
    """Return a maker of arguments for a command on the small graph, writing below tmp_path only."""

    def arguments(command: str, *overrides: str) -> list[object]:
        own = [f"output.dir={tmp_path / 'run'}", f"data.store={tmp_path / 'store'}", *overrides]
        return [command, "-c", made / "small.yaml", *(part for override in own for part in ("-s", override))]

    shutil.copytree(made / "store", tmp_path / "store")
    return arguments
