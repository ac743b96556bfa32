"""Damaged stores, runs and archives, and data that cannot be what it says: refused by name, each with its exit code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import refuse, run
from tests.raw import write_ogb

pytestmark = pytest.mark.usefixtures("_threads_put_back")

# what is damaged


def flip(file: Path, at: int, bit: int = 0x40) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= bit
    file.write_bytes(content)


def test_a_damaged_store_is_refused_by_name(small: Callable[..., list[object]], made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name, at in [("indices", -1), ("indptr", -1), ("indptr", 140), ("test_negatives", -1), ("valid_edge", -1)]:
        file = store / f"{name}.npy"
        flip(file, at)  # an id or pointer that leads out of the graph: the kernels check no bounds
        assert f"{file}: damaged" in refuse(2, *small("train"))
        assert f"{file}: damaged" in refuse(2, "verify", store)
        shutil.copy(made / "store" / file.name, file)
    source, target = store / "train_source.npy", store / "train_target.npy"
    shutil.copy(made / "store" / target.name, source)
    shutil.copy(made / "store" / source.name, target)
    assert f"{source}: damaged or swapped" in refuse(2, *small("train"))
    assert refuse(2, "verify", store, lines=2).count("swapped: it holds what belongs in train_") == 2
    os.truncate(store / "features.npy", 200)
    (store / "year.npy").unlink()
    said = refuse(2, *small("train"), lines=2)
    assert "features.npy: truncated" in said
    assert "year.npy: missing" in said


def test_prepare_mends_a_store_with_a_flipped_bit(small: Callable[..., list[object]], tmp_path: Path) -> None:
    flip(tmp_path / "store" / "features.npy", -7)
    assert "features.npy: damaged" in refuse(2, "verify", tmp_path / "store")
    ended = run(*small("prepare"))
    assert ended.code == 0
    assert "preparing the store again" in ended.err
    assert run("verify", tmp_path / "store").code == 0


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.clear(),
        lambda m: m.update(format=2),
        lambda m: m.pop("counts"),
        lambda m: m.update(directed="no"),
        lambda m: m.update(directed=not m["directed"]),
        lambda m: m.update(warnings=5),
        lambda m: m["arrays"].pop("features.npy"),
        lambda m: m["arrays"].update({"../year.npy": m["arrays"]["year.npy"]}),
        lambda m: m["arrays"].update({"year.npy": 1}),
        lambda m: m["arrays"]["features.npy"].update(dtype="O"),
        lambda m: m["arrays"]["features.npy"].update(shape=[0, -1]),
        lambda m: m["arrays"]["features.npy"].update(shape="ab"),
        lambda m: m["arrays"]["features.npy"].update(sha256=1),
    ],
)
def test_an_edited_manifest_is_refused(tmp_path: Path, made: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    shutil.copytree(made / "store", tmp_path / "store")
    file = tmp_path / "store" / "manifest.json"
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))
    ended = run("verify", tmp_path / "store")
    assert ended.code == 2
    assert ended.errors


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"[1]"], ids=["empty", "binary", "deep", "list"])
def test_a_manifest_that_is_none(small: Callable[..., list[object]], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store" / "manifest.json").write_bytes(content)
    for command in (small("train"), ["verify", tmp_path / "store"]):
        assert "manifest.json: " in refuse(2, *command)


def test_a_damaged_run_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "is not a run folder" in refuse(3, "eval", folder)
    shutil.copytree(made / "run", folder)
    weights = load_file(folder / "model.safetensors")
    assert "is not in the config's model" in refuse(
        2, "eval", folder, "-s", "model.layers=1", "-s", "sampling.fanouts=[3]", lines=3
    )
    save_file({**weights, "extra": torch.zeros(1)}, folder / "model.safetensors")
    assert "extra: is not in the config's model" in refuse(2, "eval", folder)
    os.truncate(folder / "model.safetensors", 50)
    assert "model.safetensors: is damaged" in refuse(2, "eval", folder)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors: no weights" in refuse(3, "eval", folder)
    (folder / "config.yaml").write_text("model: {hidden: many}")
    assert "model.hidden" in refuse(2, "eval", folder)


# what is given

N = 30
PAIRS = np.array(sorted({(u, (u * u + k) % N) for u in range(N) for k in (1, 3, 7)} - {(u, u) for u in range(N)})).T
GOOD: dict[str, Any] = {"edge_index": PAIRS, "x": np.ones((N, 2), np.float32), "node_year": np.arange(N) % 7 + 1990}
SPLIT: dict[str, Any] = {
    "train_edge": PAIRS[:, :40], "source": PAIRS[0, 40:44], "valid_target": PAIRS[1, 40:44],
    "test_target": PAIRS[1, 44:48], "valid_target_neg": np.ones((4, 3), int), "test_target_neg": np.ones((4, 3), int),
}  # fmt: skip


def npz_arguments(folder: Path) -> list[object]:
    settings = ["source=npz", f"path={folder / 'raw'}", f"store={folder / 'store'}", "negatives=3"]
    return ["prepare", *(part for setting in settings for part in ("-s", f"data.{setting}"))]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"edge_index": PAIRS.astype(float)}, "edge_index: ids are integers (got float64)"),
        ({"edge_index": PAIRS.astype(str)}, "edge_index: ids are integers"),
        ({"edge_index": PAIRS.astype(object)}, "holds pickled objects, which are never loaded"),
        ({"edge_index": PAIRS - 1}, "unknown ids: outside [0, 30)"),
        ({"edge_index": PAIRS + 5}, "unknown ids: outside [0, 30)"),
        ({"edge_index": PAIRS.astype(np.uint64) + np.uint64(2**63)}, "unknown ids"),
        ({"edge_index": PAIRS.T}, "must be [2, E]"),
        ({"edge_index": np.int64(3)}, "must be [2, E]"),
        ({"edge_index": PAIRS[:, :0]}, "the graph is empty"),
        ({"edge_index": np.ones((2, 4), int)}, "no edge is left after clean-up"),
        ({"edge_index": None}, "no edge_index"),
        ({"x": np.full((N, 2), np.nan)}, "features: NaN, infinite or too large in 30 rows"),
        ({"x": np.full((N, 2), 1e300)}, "features: NaN, infinite or too large in 30 rows"),
        ({"x": np.ones((N, 2), complex)}, "x: features are numbers (got complex128)"),
        ({"x": np.full((N, 2), "1")}, "x: features are numbers"),
        ({"x": np.ones(N)}, "features: must be [30, F]"),
        ({"x": None}, "needs num_nodes or features"),
        ({"num_nodes": 30.7}, "num_nodes: is one whole number"),
        ({"num_nodes": 2**40}, "num_nodes: must be between 1 and"),
        ({"directed": np.array("no")}, "directed: is true or false"),
        ({"node_year": GOOD["node_year"].astype(str)}, "year: must be [30] numbers"),
        ({"node_year": GOOD["node_year"].astype("datetime64[Y]")}, "year: must be [30] numbers"),
        ({"node_year": np.where(np.arange(N) == 3, np.nan, 1990.0)}, "1 impossible years"),
        ({"node_year": GOOD["node_year"][:4]}, "year: must be [30] numbers"),
        ({**SPLIT, "source": None}, "half a split: lacks source"),
        ({**SPLIT, "train_edge": np.ones((2, 4), int)}, "no training edge is left after clean-up"),
        ({**SPLIT, "valid_target_neg": np.full((4, 3), -1)}, "valid negatives: 12 unknown ids"),
        ({**SPLIT, "valid_target_neg": np.ones((2, 3), int)}, "valid negatives: must be [4, K]"),
        ({**SPLIT, "test_target_neg": np.ones((4, 3))}, "test_target_neg: ids are integers"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, members: dict[str, Any], said: str) -> None:
    (tmp_path / "raw").mkdir()
    arrays = {name: array for name, array in (GOOD | members).items() if array is not None}
    np.savez(tmp_path / "raw" / "g.npz", **arrays)
    ended = run(*npz_arguments(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert said in "\n".join(ended.errors)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_damaged_anywhere_is_refused_or_read(tmp_path: Path, save: Callable[..., None]) -> None:
    from horovod_trainer.config import DataSection
    from horovod_trainer.data.sources import npz
    from horovod_trainer.errors import InvalidInput

    file = tmp_path / "g.npz"
    save(file, **GOOD)
    good = file.read_bytes()
    refused = []
    for at in range(0, len(good), 3):
        flip(file, at, 1 << (at % 8))
        try:
            npz.load(DataSection(source="npz", path=str(tmp_path)), lambda stage, done, total: None)
        except InvalidInput as failure:
            refused.append(str(failure))
        file.write_bytes(good)
    assert len(refused) > len(good) // 12
    assert all(str(file) in said or said.startswith("g: ") for said in refused)


def test_what_is_no_archive_or_not_there(tmp_path: Path) -> None:
    assert "no .npz file here" in refuse(3, *npz_arguments(tmp_path))
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "g.npy", PAIRS)
    (tmp_path / "raw" / "g.npy").rename(tmp_path / "raw" / "g.npz")
    assert "g.npz: not an npz archive" in refuse(2, *npz_arguments(tmp_path))


def test_what_the_graph_cannot_give(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    np.savez(tmp_path / "raw" / "g.npz", **{name: GOOD[name] for name in ("edge_index", "x")})
    assert "lower data.negatives" in refuse(2, *npz_arguments(tmp_path), "-s", "data.negatives=30")
    assert "g has no years" in refuse(2, *npz_arguments(tmp_path), "-s", "data.split=time")
    assert "without a split of its own" in refuse(2, *npz_arguments(tmp_path), "-s", "data.split=given")
    assert run(*npz_arguments(tmp_path)).code == 0
    arguments = ["train", *npz_arguments(tmp_path)[1:], "-s", f"output.dir={tmp_path / 'run'}"]
    assert "sampling.neighbours" in refuse(2, *arguments, "-s", "sampling.neighbours=not_later")
    assert not (tmp_path / "run").exists()


def test_an_ogb_folder_half_there(tmp_path: Path) -> None:
    arguments = ["prepare", "-s", "data.source=ogb", "-s", f"data.store={tmp_path / 'store'}", "-s"]
    assert "needs the folder" in refuse(2, *arguments, "data.name=ogbl-citation2")
    arguments.append(f"data.path={tmp_path}")
    assert "set data.download=true to fetch it" in refuse(3, *arguments)
    assert "did you mean ogbl-collab" in refuse(2, *arguments, "-s", "data.name=ogbl-colab")
    part = {"source_node": PAIRS[0, 40:44], "target_node": PAIRS[1, 40:44], "target_node_neg": np.ones((4, 3), int)}
    split = {"train": {"source_node": PAIRS[0, :40], "target_node": PAIRS[1, :40]}, "valid": part, "test": part}
    folder = write_ogb(tmp_path, "ogbl-citation2", "time", {"edge_index": PAIRS[:, :40], "num_nodes": N}, split)
    for name in ("valid", "test"):
        (folder / "split" / "time" / f"{name}.pt").rename(tmp_path / name)
    said = refuse(3, *arguments, lines=2)
    assert "valid.pt: missing" in said
    assert "test.pt: missing" in said
    for name in ("valid", "test"):
        (tmp_path / name).rename(folder / "split" / "time" / f"{name}.pt")
    os.truncate(folder / "raw" / "edge.csv.gz", 30)
    assert "edge.csv.gz: not a readable gzipped CSV" in refuse(2, *arguments)
