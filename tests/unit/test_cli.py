"""The command line as a user meets it: one clear line per mistake, its exit code, no traceback, nothing half-written."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from horovod_trainer import cli
from horovod_trainer.data.store import StoreWriter
from horovod_trainer.errors import ExitCode
from tests.raw import write_ogb

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("prepare", "verify", "train", "eval", "config", "check")
SMALL = """
data: {source: synthetic, store: STORE, negatives: 2,
       synthetic: {nodes: 12, years: 3, references: 3.0, features: 4, topics: 2}}
model: {hidden: 8, out: 8}
negatives: {kind: shared, count: 4}
train: {epochs: 2, batch_size: 4, micro_batches: 1, threads: 1}
output: {dir: RUN}
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Return the error lines; anything else on stderr that is not a log line fails here."""
        assert "Traceback" not in self.err, self.err
        assert "Warning" not in self.err, self.err
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(*arguments: object) -> Ended:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["horovod_trainer", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert isinstance(ended.value.code, int)
    return Ended(int(ended.value.code), out.getvalue(), err.getvalue())


def start(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Start the real command."""
    command = [sys.executable, "-m", "horovod_trainer", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **more})


def refuse(code: int, *arguments: object, lines: int = 1) -> str:
    """Run what must be refused with `code`, `lines` error lines and nothing on stdout; return those lines."""
    ended = run(*arguments)
    assert (ended.code, len(ended.errors), ended.out) == (code, lines, ""), ended
    return "\n".join(ended.errors)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


# what is typed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["traain"], "No such command 'traain'. Did you mean 'train'?"),
        (["train", "--frob"], "No such option: --frob"),
        (["train", "--max-hours", "soon"], "'--max-hours'"),
        (["train", "--max-hours", "nan"], "train.max_hours"),
        (["train", "--max-hours", "-1"], "train.max_hours"),
        (["verify"], "STORE"),
        (["eval"], "RUN"),
        (["eval", ".", "--split", "train"], "--split"),
        (["config", "extra"], "extra"),
        (["config", "-s"], "'-s' requires an argument"),
        (["config", "-s", "model.layers"], "-s: an override is section.key=value (got 'model.layers')"),
        (["config", "-s", "=3"], "-s: an override is section.key=value"),
        (["check", "-o", "xml"], "--output"),
        (["config", "-s", "train.seed=-1"], "train.seed: Input should be greater than or equal to 0 (got -1)"),
        (["config", "-s", "optim.lr=.inf"], "optim.lr"),
        (["config", "-s", "loss.margin=.nan"], "loss.margin"),
        (["config", "-s", "train.batch_size=1000000000000000000000"], "train.batch_size"),
        (["config", "-s", "train.micro_batches=100000000"], "train.micro_batches"),
        (["config", "-s", 'data.store="a\\0b"'], "data.store: is the name of a file or folder"),
        (["config", "-s", "output.dir=' '"], "output.dir: is the name of a file or folder"),
        (["config", "-s", "data.synthetic.first_year=2990"], "data.synthetic.years"),
        (["config", "-s", "data.synthetic.topics=100000000000"], "data.synthetic.topics"),
    ],
)
def test_a_typing_mistake_is_one_line(typed: list[str], said: str) -> None:
    assert said in refuse(2, *typed)


def test_no_command_shows_the_commands() -> None:
    ended = run()
    assert (ended.code, ended.out) == (2, "")
    assert all(f"  {command} " in ended.err for command in COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_readable(command: str) -> None:
    ended = run(*command.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == run(*command.split(), "-h").out
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    for noise in ("...\n", "<class", "<list", "horovod_trainer.", "Traceback"):
        assert noise not in ended.out.replace("[ARGS]...", "")


def test_several_mistakes_are_all_told(tmp_path: Path) -> None:
    file = tmp_path / "ünï ☃.yaml"
    file.write_text("data: {source: nope}\ntrain: {epochs: 0, lr: 3}\nfrob: 1\n")
    said = refuse(2, "train", "-c", file, "-s", "model.layers='3'", lines=5)
    assert said.count("ünï ☃.yaml:") == 4
    assert "[-s model.layers='3']" in said


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, 3), (b"\xff\x00\xfe", 2), (b"\0", 2), (b"a: [", 2), (b"- 1\n- 2\n", 2), (b"a: 1\n" * 300_000, 2)],
    ids=["missing", "binary", "nul", "cut", "list", "huge"],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes | None, code: int) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_bytes(content)
    assert str(tmp_path / "c.yaml") in refuse(code, "prepare", "-c", tmp_path / "c.yaml")


def test_a_folder_for_a_file_and_an_empty_file(tmp_path: Path) -> None:
    assert "Is a directory" in refuse(2, "config", "-c", tmp_path)
    (tmp_path / "empty.yaml").touch()
    assert run("config", "-c", tmp_path / "empty.yaml").out == run("config").out


# what comes out


def test_a_tiny_graph_trains_to_the_end(made: Path) -> None:
    result = json.loads((made / "run" / "result.json").read_text())
    assert result["best_epoch"] in (1, 2)
    assert all(0 < result[split]["mrr"] <= 1 for split in ("valid", "test"))
    last = (made / "train.out").read_text().splitlines()[-1]
    assert last == f"test MRR {result['test']['mrr']:.4f}   curves: {made / 'run' / 'curves.png'}"
    assert {entry.name for entry in (made / "run").iterdir()} == {
        "config.yaml", "curves.png", "metrics.jsonl", "model.safetensors", "result.json", "tensorboard",
    }  # fmt: skip


def test_json_is_one_document(made: Path, small: Callable[..., list[object]]) -> None:
    commands: list[list[object]] = [
        small("prepare"), ["verify", made / "store"], small("train"), ["eval", made / "run", "--split", "valid"],
        small("config"), ["check"],
    ]  # fmt: skip
    documents = {str(command[0]): json.loads(run(*command, "-o", "json").out) for command in commands}
    assert documents["config"]["data"]["synthetic"]["nodes"] == 12
    assert documents["train"]["test"] == json.loads((made / "run" / "result.json").read_text())["test"]
    assert documents["eval"]["mrr"] == documents["train"]["valid"]["mrr"]
    assert isinstance(documents["check"]["ok"], bool)


def test_a_batch_larger_than_all_edges_is_one_step(small: Callable[..., list[object]], tmp_path: Path) -> None:
    assert run(*small("train", "train.batch_size=100000", "train.epochs=1")).code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 1


def test_a_loss_that_is_not_finite_ends_with_its_own_code(small: Callable[..., list[object]]) -> None:
    assert "lower optim.lr" in refuse(7, *small("train", "optim.lr=1e30"))


# where things lie


def test_prepare_writes_over_stores_only(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for place, said in [
        ("file", "file: exists and is not a store"),
        ("file/below", "file: cannot be made a folder: a file is in the way"),
        ("folder", "folder: exists and is not a store"),
        ("link", "link: exists and is not a store"),
    ]:
        assert said in refuse(4, "prepare", "-c", made / "small.yaml", "-s", f"data.store={tmp_path / place}")
    monkeypatch.chdir(tmp_path / "empty")
    assert "current folder" in refuse(4, "prepare", "-c", made / "small.yaml", "-s", "data.store=.")
    assert sorted(tmp_path.rglob("*")) == before  # no lock, no part of a store
    assert "/proc/" in refuse(3, "prepare", "-c", made / "small.yaml", "-s", "data.store=/proc/store")


def test_a_linked_store_is_written_where_the_link_leads(made: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert run("prepare", "-c", made / "small.yaml", "-s", f"data.store={tmp_path / 'link'}").code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "manifest.json").is_file()


def test_training_needs_a_store(tmp_path: Path, small: Callable[..., list[object]]) -> None:
    for place in ("nowhere", "file", "file/below"):
        (tmp_path / "file").touch()
        assert "no store here" in refuse(3, *small("train", f"data.store={tmp_path / place}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["launch.expected_size=2", "launch.expected_hosts=2"], 6, "launch.expected_size"),
        (["negatives.count=1"], 2, "negatives.count"),
        (["data.split_seed=1"], 4, "data.split_seed: the store"),
        (["output.dir=FILE"], 4, "a file is in the way"),
        (["output.dir=FILE/below"], 4, "a file is in the way"),
        (["output.dir=FOREIGN"], 4, "holds a config.yaml that no run wrote"),
    ],
)
def test_a_refused_run_touches_nothing(
    small: Callable[..., list[object]], made: Path, tmp_path: Path, overrides: list[str], code: int, said: str
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "FILE").touch()
    (tmp_path / "FOREIGN").mkdir()
    for name in ("config.yaml", "notes"):
        (tmp_path / "FOREIGN" / name).write_text("mine: 1")
    before = sorted(tmp_path.rglob("*"))
    ended = run(*small("train", *(override.replace("=F", f"={tmp_path}/F") for override in overrides)))
    assert ended.code == code
    assert said in "\n".join(ended.errors)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_current_folder_is_not_renamed(
    small: Callable[..., list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(*small("train", "output.dir=.", "train.epochs=1")).code == 0
    assert "it is the current folder" in refuse(4, *small("train", "output.dir=.", "train.epochs=1"))


def test_a_full_disk_is_named(small: Callable[..., list[object]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    assert f"{tmp_path}/run/metrics.jsonl: No space left on device" in refuse(1, *small("train"))


def test_a_store_that_does_not_fit_is_an_error_not_a_crash(small: Callable[..., list[object]], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = small("prepare", f"data.store={tmp_path / 'large'}", "data.synthetic.nodes=3000",
                   "data.synthetic.features=100")  # fmt: skip
    try:  # the size of a file stands in for that of a disk; writing a mapped page beyond it would kill the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        said = refuse(1, *wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "features.npy: File too large" in said
    assert not (tmp_path / "large").exists()
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob(".*.partial"))


def test_room_for_an_array_is_reserved_before_it_is_filled(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:
        writer.allocate("features", (1000, 100), np.float32)
        (file,) = tmp_path.glob(".store.*.partial/features.npy")
        assert file.stat().st_blocks * 512 >= 400_000  # a sparse file would have next to none


def test_out_of_memory_is_an_error_and_a_bug_is_a_traceback(small: Callable[..., list[object]], tmp_path: Path) -> None:
    wanted = small("prepare", f"data.store={tmp_path / 'other'}")
    for failure in (MemoryError("1 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 TiB")):
        with patch("horovod_trainer.data.prepare._load", side_effect=failure):
            assert "out of memory" in refuse(1, *wanted)
    with patch("horovod_trainer.data.prepare._load", side_effect=ZeroDivisionError):
        ended = run(*wanted)
    assert ended.code == 1
    assert "Traceback" in ended.err


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


# the real process


def test_exit_codes_and_streams_of_the_real_command(tmp_path: Path) -> None:
    with start("train", "-s", f"data.store={tmp_path}") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (ExitCode.NOT_FOUND, "")
    assert err == f"error: {tmp_path}: no store here; `prepare`, given the same -c and -s, makes it\n"


def test_a_reader_that_leaves_gets_no_complaint() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start("config", stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate(timeout=120)
    assert err == ""
    assert process.returncode == ExitCode.FAILED


def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full, start("config", "-o", "json", stdout=full) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.FAILED
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_closed_output_is_no_error() -> None:
    command = f"exec {sys.executable} -m horovod_trainer config >&-"
    done = subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupting_training_ends_at_once_and_quietly(made: Path, tmp_path: Path) -> None:
    arguments = ["train", "-c", made / "small.yaml", "-s", "train.epochs=1000000", "-s", f"output.dir={tmp_path / 'r'}"]
    with start(*arguments) as process:
        assert process.stderr is not None
        said = ""
        while "step 1/" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in said + rest
    assert not (tmp_path / "r" / "result.json").exists()


def test_the_documented_codes_are_the_real_ones() -> None:
    table = (ROOT / "docs" / "errors.md").read_text()
    documented = {int(line.split("|")[1]) for line in table.splitlines() if line.startswith("| ") and line[2].isdigit()}
    assert documented <= set(ExitCode)
    assert {0, 1, 2, 3, 4, 5, 6, 7, 130} <= documented
