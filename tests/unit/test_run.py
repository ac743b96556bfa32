"""Run folders: earlier results are kept, weights come back, damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from horovod_trainer.config import Config, ModelSection
from horovod_trainer.errors import InvalidInput, NotFound
from horovod_trainer.model import LinkPredictor
from horovod_trainer.run import CONFIG, WEIGHTS, keep_earlier, load_model, load_run_config

SMALL = Config(model=ModelSection(hidden=4, out=4))


def test_an_earlier_run_is_renamed_not_overwritten(tmp_path: Path) -> None:
    for content in ("first", "second"):
        run = tmp_path / "run"
        keep_earlier(run)
        run.mkdir()
        (run / CONFIG).write_text(content)
    keep_earlier(tmp_path / "run")
    assert {f.name: (f / CONFIG).read_text() for f in tmp_path.iterdir()} == {"run.1": "first", "run.2": "second"}


def test_a_folder_without_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    keep_earlier(tmp_path)
    assert (tmp_path / "notes.txt").exists()


def test_weights_come_back(tmp_path: Path) -> None:
    model = LinkPredictor(SMALL.model, 3, seed=5)
    save_file(model.state_dict(), tmp_path / WEIGHTS)
    loaded = load_model(tmp_path, SMALL, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_another_architecture_is_refused_by_field(tmp_path: Path) -> None:
    save_file(LinkPredictor(SMALL.model, 3, seed=5).state_dict(), tmp_path / WEIGHTS)
    with pytest.raises(InvalidInput) as caught:
        load_model(tmp_path, SMALL, 7)
    assert len(caught.value.problems) == 2  # both matrices of layer 1
    assert "encoder.layers.0" in str(caught.value)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not a run folder"):
        load_run_config(tmp_path, ())
    with pytest.raises(NotFound, match="did not come to its end"):
        load_model(tmp_path, SMALL, 3)
    (tmp_path / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(InvalidInput, match="damaged"):
        load_model(tmp_path, SMALL, 3)
