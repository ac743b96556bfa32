"""The command line as a user meets it: one clear line per mistake, its exit code, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from horovod_trainer.cli import allow_for_copies
from horovod_trainer.config import load_config
from horovod_trainer.data.store import StoreWriter
from horovod_trainer.errors import ExitCode
from tests.commands import COMMANDS, ROOT, refuse, run, start

pytestmark = pytest.mark.usefixtures("_threads_put_back")

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
        "checkpoints", "config.yaml", "curves.png", "metrics.jsonl", "model.safetensors", "result.json", "tensorboard",
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


def test_averaged_weights_are_validated_and_kept_and_change_no_step(
    small: Callable[..., list[object]], tmp_path: Path
) -> None:
    losses, weights = [], []
    for setting in ("null", "0.5"):
        out = tmp_path / f"average-{setting}"
        assert run(*small("train", f"output.dir={out}", "train.epochs=1", f"optim.average={setting}")).code == 0
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if row["event"] == "step"])
        weights.append((out / "model.safetensors").read_bytes())
    assert losses[0] == losses[1]
    assert weights[0] != weights[1]


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
    again = [*small("train", "output.dir=.", "train.epochs=1"), "--resume", "never"]
    assert "it is the current folder" in refuse(4, *again)


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
    # a job that a shell put into the background ignores SIGINT, and what it starts inherits that
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with start(*arguments, preexec_fn=listening) as process:
        assert process.stderr is not None
        said = ""
        while "step 1/" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        try:
            _, rest = process.communicate(timeout=60)
        finally:
            process.kill()  # or the `with` would wait for ever
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in said + rest
    assert not (tmp_path / "r" / "result.json").exists()


def test_the_documented_codes_are_the_real_ones() -> None:
    table = (ROOT / "docs" / "errors.md").read_text()
    documented = {int(line.split("|")[1]) for line in table.splitlines() if line.startswith("| ") and line[2].isdigit()}
    assert documented <= set(ExitCode)
    assert {0, 1, 2, 3, 4, 5, 6, 7, 130} <= documented


def test_a_start_waits_for_nodes_that_still_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HOROVOD_GLOO_TIMEOUT_SECONDS"
    monkeypatch.setenv(name, "77")  # so that it is put back
    allow_for_copies(load_config([], [f"data.stage={tmp_path}"]))
    assert os.environ[name] == "77"  # the user's own
    monkeypatch.delenv(name)
    allow_for_copies(load_config([], []))
    assert name not in os.environ
    allow_for_copies(load_config([], [f"data.stage={tmp_path}"]))
    assert float(os.environ[name]) > 30
