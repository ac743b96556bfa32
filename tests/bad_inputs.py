"""A catalogue of bad inputs: configs, data files, stores, runs and checkpoints, each with the exit code it must end with.

Over 250 lines: it is a table.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from horovod_trainer.documents import digest
from tests.commands import SMALL, Ended, run
from tests.raw import write_ogb

N = 30
PAIRS = np.array(sorted({(u, (u * u + k) % N) for u in range(N) for k in (1, 3, 7)} - {(u, u) for u in range(N)})).T
GRAPH: dict[str, Any] = {"edge_index": PAIRS, "x": np.ones((N, 2), np.float32), "node_year": np.arange(N) % 7 + 1990}
Build = Callable[[Path], list[object]]
NOBODY = 65534


@dataclass(frozen=True)
class Bad:
    """One bad input: build(folder) damages a copy of what is good there and returns the command that must refuse it.

    says: what some error line must contain. stranger: run by a user with no rights to the folder.
    """

    name: str
    code: int
    says: str
    build: Build
    stranger: bool = False


# configs: what stands in the file, or after -s

TEXTS: list[tuple[str, bytes, int, str]] = [
    ("truncated in a quote", b'data: {store: "da', 2, "c.yaml:1"),
    ("truncated in a bracket", b"sampling:\n  fanouts: [5, ", 2, "c.yaml:"),
    ("binary", bytes(range(256)), 2, "c.yaml"),
    ("not UTF-8", "data: {name: Zürich}".encode("latin-1"), 2, "c.yaml"),
    ("UTF-16", "train: {epochs: 1}".encode("utf-16"), 2, "c.yaml"),
    ("NUL", b"data: {store: 'a\0b'}", 2, "c.yaml:1"),
    ("a tab", b"train:\n\tepochs: 1", 2, "c.yaml:2"),
    ("a duplicate key", b"train: {epochs: 1}\ntrain: {epochs: 2}", 2, "train"),
    ("a duplicate field", b"train: {epochs: 1, epochs: 2}", 2, "train.epochs"),
    ("a list", b"- train\n- data", 2, "c.yaml"),
    ("a number", b"7", 2, "c.yaml"),
    ("two documents", b"train: {epochs: 1}\n---\ntrain: {epochs: 2}", 2, "c.yaml"),
    ("an alias of nothing", b"train: *other", 2, "c.yaml:1"),
    ("an alias of itself", b"train: &a {epochs: *a}", 2, "c.yaml"),
    ("a billion laughs", b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"\n".join(
        b"%c: &%c [%s]" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefghi"), 2, "c.yaml"),
    ("nesting without end", b"[" * 50_000, 2, "c.yaml"),
    ("a Python object", b"train: !!python/object/apply:os.system ['true']", 2, "c.yaml:1"),
    ("an unknown section", b"trian: {epochs: 1}", 2, "did you mean train"),
    ("an unknown field", b"train: {epoch: 1}", 2, "did you mean epochs"),
    ("a scalar for a section", b"train: 5", 2, "train: is a section"),
    ("a list for a section", b"train: [1]", 2, "train: is a section"),
    ("a key that is a number", b"1: {epochs: 1}", 2, "1"),
    ("null for a number", b"train: {epochs: null}", 2, "train.epochs"),
]  # fmt: skip
OVERRIDES: list[tuple[str, str, str]] = [
    ("negative epochs", "train.epochs=-1", "train.epochs"),
    ("zero epochs", "train.epochs=0", "train.epochs"),
    ("huge epochs", "train.epochs=99999999999999999999", "train.epochs"),
    ("a float for an integer", "train.epochs=1.5", "train.epochs"),
    ("text for an integer", "train.epochs=many", "train.epochs"),
    ("a boolean for an integer", "train.epochs=true", "train.epochs"),
    ("a list for an integer", "train.epochs=[1]", "train.epochs"),
    ("NaN for a rate", "optim.lr=.nan", "optim.lr"),
    ("infinity for a rate", "optim.lr=.inf", "optim.lr"),
    ("a negative rate", "optim.lr=-1e-3", "optim.lr"),
    ("a zero rate", "optim.lr=0.0", "optim.lr"),
    ("a rate beyond floats", "optim.lr=1e999", "optim.lr"),
    ("a fraction of one", "model.dropout=1.0", "model.dropout"),
    ("a negative fraction", "data.valid_fraction=-0.1", "data.valid_fraction"),
    ("fractions that leave nothing", "data.test_fraction=0.95", "data.test_fraction"),
    ("a fan-out of zero", "sampling.fanouts=[0, 5]", "sampling.fanouts"),
    ("a fan-out too few", "sampling.fanouts=[5]", "sampling.fanouts"),
    ("text among fan-outs", "sampling.fanouts=[5, five]", "sampling.fanouts"),
    ("a width beyond memory", "model.hidden=1000000000", "model.hidden"),
    ("an unknown choice", "model.aggregator=median", "model.aggregator"),
    ("an empty choice", "loss.kind=", "loss.kind"),
    ("a choice in capitals", "optim.kind=ADAM", "optim.kind"),
    ("an average of one", "optim.average=1.0", "optim.average"),
    ("a seed below zero", "train.seed=-1", "train.seed"),
    ("a seed beyond 63 bits", "train.seed=9223372036854775808", "train.seed"),
    ("an empty folder name", "output.dir=''", "output.dir"),
    ("a blank folder name", "output.dir='  '", "output.dir"),
    ("a watchdog that bites at once", "train.watchdog_s=0.01", "train.watchdog_s"),
    ("no checkpoint to keep", "checkpoint.keep_last=0", "checkpoint.keep_last"),
    ("a checkpoint every minus minute", "checkpoint.every_minutes=-1.0", "checkpoint.every_minutes"),
    ("an unknown communicator", "train.communicator=nccl", "train.communicator"),
    ("a number of 5,000 digits", f"train.seed={'9' * 5000}", "train.seed"),
    ("a path of 1,000 parts", f"{'a.' * 1000}b=1", "-s"),
    ("no equals sign", "train.epochs", "-s"),
    ("no section", "=5", "-s"),
    ("an empty part", "train..epochs=5", "-s"),
    ("a path into a number", "train.epochs.more=5", "train.epochs"),
    ("an open bracket", "sampling.fanouts=[5", "sampling.fanouts"),
    ("years beyond the calendar", "data.synthetic.first_year=2999", "data.synthetic.years"),
    ("one negative shared", "negatives.count=1", "negatives.count"),
    ("a source without its folder", "data.source=ogb", "data.path"),
]


def config_text(content: bytes) -> Build:
    """Return a build that prints a config file of this content."""

    def build(folder: Path) -> list[object]:
        (folder / "c.yaml").write_bytes(content)
        return ["config", "-c", folder / "c.yaml"]

    return build


def config_override(word: str) -> Build:
    """Return a build that gives an override on the command line."""
    return lambda folder: ["config", "-c", folder / "small.yaml", "-s", word]


def small(command: str, folder: Path, *overrides: str) -> list[object]:
    """Return a command on the folder's own store and run."""
    own = (f"data.store={folder / 'store'}", f"output.dir={folder / 'run'}", "train.epochs=1", *overrides)
    return [command, "-c", folder / "small.yaml", *(part for word in own for part in ("-s", word))]


# npz archives: arrays that make no sense, and files that are none

ARRAYS: list[tuple[str, dict[str, Any], str]] = [
    ("float ids", {"edge_index": PAIRS.astype(float)}, "ids are integers"),
    ("text ids", {"edge_index": PAIRS.astype(str)}, "ids are integers"),
    ("boolean ids", {"edge_index": PAIRS > 3}, "ids are integers"),
    ("pickled ids", {"edge_index": PAIRS.astype(object)}, "pickled objects"),
    ("negative ids", {"edge_index": PAIRS - 1}, "unknown ids"),
    ("ids beyond the nodes", {"edge_index": PAIRS + 5}, "unknown ids"),
    ("ids beyond 63 bits", {"edge_index": PAIRS.astype(np.uint64) + np.uint64(2**63)}, "unknown ids"),
    ("edges the other way round", {"edge_index": PAIRS.T}, "must be [2, E]"),
    ("edges in three dimensions", {"edge_index": PAIRS[None]}, "must be [2, E]"),
    ("no edges", {"edge_index": PAIRS[:, :0]}, "empty"),
    ("loops only", {"edge_index": np.ones((2, 4), int)}, "no edge is left"),
    ("NaN features", {"x": np.full((N, 2), np.nan)}, "NaN"),
    ("infinite features", {"x": np.full((N, 2), np.inf)}, "infinite"),
    ("features beyond float32", {"x": np.full((N, 2), 1e300)}, "too large"),
    ("complex features", {"x": np.ones((N, 2), complex)}, "features are numbers"),
    ("features of a vector", {"x": np.ones(N)}, "must be [30, F]"),
    ("features of too few nodes", {"x": np.ones((N - 1, 2)), "num_nodes": N}, "must be [30, F]"),
    ("a fraction of a node", {"num_nodes": 30.5}, "num_nodes"),
    ("minus one nodes", {"num_nodes": -1}, "num_nodes"),
    ("more nodes than ids", {"num_nodes": 2**40}, "num_nodes"),
    ("text for directed", {"directed": np.array("no")}, "directed"),
    ("text years", {"node_year": GRAPH["node_year"].astype(str)}, "year"),
    ("too few years", {"node_year": GRAPH["node_year"][:4]}, "year"),
    ("NaN years", {"node_year": np.full(N, np.nan)}, "impossible years"),
    ("half a split", {"train_edge": PAIRS[:, :40]}, "half a split"),
]
FILES: list[tuple[str, Callable[[Path], Any], int, str]] = [
    ("cut in the middle", lambda file: os.truncate(file, file.stat().st_size // 2), 2, "g.npz"),
    ("cut at the end", lambda file: os.truncate(file, file.stat().st_size - 3), 2, "g.npz"),
    ("empty", lambda file: file.write_bytes(b""), 2, "g.npz"),
    ("a text", lambda file: file.write_text("1,2\n"), 2, "not an npz archive"),
    ("a zip of something else", lambda file: _zip(file, {"notes.txt": b"mine"}), 2, "no edge_index"),
    ("a zip with an array that is none", lambda file: _zip(file, {"edge_index.npy": b"mine"}), 2, "g.npz"),
    ("an array with a huge header", lambda file: _zip(file, {"edge_index.npy": _header(2**40)}), 2, "g.npz"),
    ("an array with negative lengths", lambda file: _zip(file, {"edge_index.npy": _header(-5)}), 2, "g.npz"),
    ("a folder", lambda file: _instead(file, Path.mkdir), 1, "g.npz"),
    ("an array with a header that is no Python", lambda file: _zip(file, {"edge_index.npy": _garbled()}), 2, "g.npz"),
    (
        "an archive behind something else",
        lambda file: file.write_bytes(b"x" + file.read_bytes()),
        2,
        "not an npz archive",
    ),
    ("gone", lambda file: file.unlink(), 3, "no .npz file here"),
    ("a link to itself", lambda file: _instead(file, lambda f: f.symlink_to(f)), 1, "g.npz"),
]


def npz(folder: Path) -> list[object]:
    """Return the command that prepares the folder's archive."""
    own = ["data.source=npz", f"data.path={folder / 'raw'}", f"data.store={folder / 'new'}", "data.negatives=3"]
    return ["prepare", *(part for word in own for part in ("-s", word))]


def npz_arrays(members: dict[str, Any]) -> Build:
    """Return a build that puts other arrays into the archive."""

    def build(folder: Path) -> list[object]:
        np.savez(folder / "raw" / "g.npz", **(GRAPH | members))
        return npz(folder)

    return build


def npz_file(damage: Callable[[Path], Any]) -> Build:
    """Return a build that damages the archive's file."""

    def build(folder: Path) -> list[object]:
        damage(folder / "raw" / "g.npz")
        return npz(folder)

    return build


def _instead(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


def _zip(file: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _garbled() -> bytes:
    return _header(3).replace(b"{", b"(")


def _header(length: int) -> bytes:
    out = BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<i8", "fortran_order": False, "shape": (2, length)})
    return out.getvalue()


# ogb folders

OGB: list[tuple[str, Callable[[Path], Any], int, str]] = [
    ("edges cut", lambda f: os.truncate(f / "raw" / "edge.csv.gz", 30), 2, "edge.csv.gz"),
    ("edges not gzipped", lambda f: (f / "raw" / "edge.csv.gz").write_text("1,2\n"), 2, "edge.csv.gz"),
    ("edges of text", lambda f: _csv(f / "raw" / "edge.csv.gz", "a,b\n"), 2, "edge.csv.gz"),
    ("edges of three columns", lambda f: _csv(f / "raw" / "edge.csv.gz", "1,2,3\n"), 2, "edge.csv.gz"),
    ("edges beyond the nodes", lambda f: _csv(f / "raw" / "edge.csv.gz", 40 * "1,99\n"), 2, "unknown ids"),
    ("edges below zero", lambda f: _csv(f / "raw" / "edge.csv.gz", 40 * "-1,2\n"), 2, "unknown ids"),
    ("features behind a dead link", lambda f: (f / "raw" / "node-feat.csv.gz").symlink_to("nowhere"), 3, "node-feat"),
    (
        "more nodes than a file can name",
        lambda f: _csv(f / "raw" / "num-edge-list.csv.gz", "999999999999\n"),
        2,
        "rows",
    ),
    ("no edges file", lambda f: (f / "raw" / "edge.csv.gz").unlink(), 3, "edge.csv.gz"),
    ("no count of nodes", lambda f: (f / "raw" / "num-node-list.csv.gz").unlink(), 3, "num-node-list"),
    ("a count of nodes that is text", lambda f: _csv(f / "raw" / "num-node-list.csv.gz", "many\n"), 2, "num-node-list"),
    ("no split", lambda f: (f / "split" / "time" / "valid.pt").unlink(), 3, "valid.pt"),
    ("a split cut", lambda f: os.truncate(f / "split" / "time" / "test.pt", 100), 2, "test.pt"),
    ("a split of text", lambda f: (f / "split" / "time" / "train.pt").write_text("x"), 2, "train.pt"),
]


def ogb(damage: Callable[[Path], Any]) -> Build:
    """Return a build that damages an OGB folder."""

    def build(folder: Path) -> list[object]:
        part = {"source_node": PAIRS[0, 40:44], "target_node": PAIRS[1, 40:44], "target_node_neg": np.ones((4, 3), int)}
        split = {"train": {"source_node": PAIRS[0, :40], "target_node": PAIRS[1, :40]}, "valid": part, "test": part}
        damage(write_ogb(folder, "ogbl-citation2", "time", {"edge_index": PAIRS[:, :40], "num_nodes": N}, split))
        own = ["data.source=ogb", f"data.path={folder}", f"data.store={folder / 'new'}"]
        return ["prepare", *(part for word in own for part in ("-s", word))]

    return build


def _csv(file: Path, text: str) -> None:
    file.write_bytes(gzip.compress(text.encode()))


# stores


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Return a damage that edits a store's manifest."""

    def edit(store: Path) -> None:
        document = json.loads((store / "manifest.json").read_text())
        change(document)
        (store / "manifest.json").write_text(json.dumps(document))

    return edit


STORES: list[tuple[str, Callable[[Path], Any], int, str]] = [
    *(
        (f"{name}.npy cut", lambda store, name=name: os.truncate(store / f"{name}.npy", 100), 2, f"{name}.npy")
        for name in ("indptr", "indices", "train_indptr", "train_source", "features", "neighbour_sum", "valid_edge")
    ),
    ("an array too long", lambda store: (store / "year.npy").write_bytes(b"x" * 9999), 2, "year.npy"),
    ("an array gone", lambda store: (store / "test_edge.npy").unlink(), 2, "test_edge.npy: missing"),
    ("another dtype", lambda store: _rewrite(store / "indices.npy", np.int64), 2, "indices.npy"),
    ("two swapped", lambda store: _swap(store / "train_source.npy", store / "train_target.npy"), 2, "train_source.npy"),
    ("an id that leads out", lambda store: _poke(store / "indices.npy", 2**30), 2, "indices.npy"),
    ("a negative id", lambda store: _poke(store / "valid_edge.npy", -5), 2, "valid_edge.npy"),
    ("no manifest", lambda store: (store / "manifest.json").unlink(), 3, "no store here"),
    ("a manifest cut", lambda store: os.truncate(store / "manifest.json", 200), 2, "manifest.json"),
    ("an empty manifest", lambda store: (store / "manifest.json").write_text(""), 2, "manifest.json"),
    ("a binary manifest", lambda store: (store / "manifest.json").write_bytes(b"\xff\xfe\0"), 2, "manifest.json"),
    ("a manifest of another version", manifest(lambda m: m.update(format=99)), 2, "format"),
    ("a manifest without arrays", manifest(lambda m: m.update(arrays={})), 2, "manifest.json"),
    ("a manifest that points out", manifest(lambda m: m["arrays"].update({"../x.npy": {}})), 2, "manifest.json"),
    ("a manifest with a negative shape", manifest(lambda m: m["arrays"]["year.npy"].update(shape=[-1])), 2, "year.npy"),
    (
        "a manifest of a foreign byte order",
        manifest(lambda m: m["arrays"]["year.npy"].update(dtype=">i4")),
        2,
        "year.npy",
    ),
    ("a manifest with a NaN", manifest(lambda m: m["counts"].update(nodes=float("nan"))), 2, "manifest.json"),
    ("an array that is a folder", lambda store: _instead(store / "year.npy", Path.mkdir), 2, "year.npy: is a folder"),
    ("a manifest with another digest", manifest(lambda m: m.update(digest="0" * 64)), 2, "manifest.json"),
]


def store(damage: Callable[[Path], Any]) -> Build:
    """Return a build that trains on a damaged store."""

    def build(folder: Path) -> list[object]:
        damage(folder / "store")
        return small("train", folder, f"output.dir={folder / 'other'}")

    return build


def _rewrite(file: Path, dtype: type) -> None:
    np.save(file, np.load(file).astype(dtype))


def _swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _poke(file: Path, value: int) -> None:
    array = np.load(file)
    array.ravel()[0] = value
    np.save(file, array)


# runs and their checkpoints


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Return a damage that edits a run's weights."""

    def edit(run_folder: Path) -> None:
        tensors = load_file(run_folder / "model.safetensors")
        change(tensors)
        save_file(tensors, run_folder / "model.safetensors")

    return edit


RUNS: list[tuple[str, Callable[[Path], Any], int, str]] = [
    ("no config", lambda r: (r / "config.yaml").unlink(), 3, "is not a run folder"),
    ("a config cut", lambda r: os.truncate(r / "config.yaml", 700), 2, "config.yaml"),
    ("a config of another model", lambda r: _edit(r / "config.yaml", "hidden: 8", "hidden: 9"), 2, "another shape"),
    ("no weights", lambda r: (r / "model.safetensors").unlink(), 3, "no weights"),
    ("weights cut", lambda r: os.truncate(r / "model.safetensors", 90), 2, "damaged"),
    ("weights with a huge header", lambda r: (r / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"), 2, "damaged"),
    ("empty weights", lambda r: (r / "model.safetensors").write_bytes(b""), 2, "damaged"),
    ("weights of another shape", weights(lambda w: w.update({k: v[:1] for k, v in w.items()})), 2, "another shape"),
    ("a tensor too many", weights(lambda w: w.update(extra=np.zeros(1))), 2, "extra"),
    ("NaN weights", weights(lambda w: [v.fill(np.nan) for v in w.values()]), 7, "not a number"),
]


def evaluated(damage: Callable[[Path], Any]) -> Build:
    """Return a build that scores with a damaged run."""

    def build(folder: Path) -> list[object]:
        damage(folder / "run")
        return ["eval", folder / "run", "-s", f"data.store={folder / 'store'}"]

    return build


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Return a damage that edits the state of every checkpoint, and leaves the pointer out."""

    def edit(checkpoints: Path) -> None:
        (checkpoints / "LATEST").unlink()
        for file in checkpoints.glob("*/state.json"):
            document = json.loads(file.read_text())
            del document["digest"]
            change(document)
            file.write_text(json.dumps(document | {"digest": signed(document)}))

    return edit


def signed(document: dict[str, Any]) -> str:
    """Return the digest that makes an edited state one that was committed so, where it can have one."""
    try:
        return digest(document)
    except ValueError:  # NaN
        return ""


def each(name: str, damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a damage done to one file of every checkpoint."""
    return lambda checkpoints: [damage(file) for file in checkpoints.glob(f"*/{name}")]


CHECKPOINTS: list[tuple[str, Callable[[Path], Any], int, str]] = [
    ("states cut", each("state.json", lambda file: os.truncate(file, 50)), 2, "state.json"),
    ("states edited", each("state.json", lambda file: _edit(file, '"step": 7', '"step": 6')), 2, "state.json"),
    ("states empty", each("state.json", lambda file: file.write_text("")), 2, "state.json"),
    ("weights cut", each("model.safetensors", lambda file: os.truncate(file, 20)), 2, "model.safetensors"),
    ("weights gone", each("model.safetensors", lambda file: file.unlink()), 2, "model.safetensors: is missing"),
    ("optimizer flipped", each("optimizer.safetensors", lambda file: _flip(file)), 2, "optimizer.safetensors"),
    ("of another version", state(lambda s: s.update(format=99)), 2, "state.json"),
    ("without progress", state(lambda s: s.pop("progress")), 2, "state.json: progress"),
    ("with a step of text", state(lambda s: s.update(step="seven")), 2, "state.json"),
    ("with a negative step", state(lambda s: s["progress"].update(step=-1)), 2, "progress.step"),
    ("with another step in its progress", state(lambda s: s["progress"].update(step=5)), 2, "progress.step"),
    ("with a NaN", state(lambda s: s["progress"].update(best_value=float("nan"))), 2, "state.json"),
    ("without config", state(lambda s: s.pop("config")), 2, "state.json: config"),
    ("with no micro-batches", state(lambda s: s.update(micro_batches=0)), 2, "state.json: micro_batches"),
    ("with negative metrics", state(lambda s: s.update(metrics_bytes=-1)), 2, "state.json: metrics_bytes"),
    ("with data of text", state(lambda s: s.update(data="mine")), 2, "state.json: data"),
    ("with files that lead out", state(lambda s: s["files"].update({"../x": {"bytes": 1, "sha256": ""}})), 2, "state.json"),
    ("with other tensors", each("model.safetensors", lambda file: _shrink(file)), 2, "another shape"),
    ("of another graph", state(lambda s: s["data"].update(digest="0" * 64)), 4, "data digest"),
    ("of another rate", state(lambda s: s["config"]["optim"].update(lr=9.0)), 4, "optim.lr"),
    ("of another batch", state(lambda s: s.update(micro_batches=7)), 4, "train.micro_batches"),
]  # fmt: skip


def resumed(damage: Callable[[Path], Any]) -> Build:
    """Return a build that goes on from damaged checkpoints."""

    def build(folder: Path) -> list[object]:
        (folder / "run" / "result.json").unlink()
        damage(folder / "run" / "checkpoints")
        return small("train", folder, "train.epochs=2", "output.tensorboard=false")

    return build


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def _shrink(file: Path) -> None:
    """Put other tensors into a checkpoint, in good order: what another architecture would have saved."""
    save_file({name: tensor[:1] for name, tensor in load_file(file).items()}, file)
    document = json.loads((file.parent / "state.json").read_text())
    del document["digest"]
    content = file.read_bytes()
    document["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (file.parent / "state.json").write_text(json.dumps(document | {"digest": digest(document)}))


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# words on the command line, and rights


def denied(path: str, mode: int, command: Build) -> Build:
    """Return a build after which a stranger may not use what lies at `path`."""

    def build(folder: Path) -> list[object]:
        (folder / path).chmod(mode)
        return command(folder)

    return build


OTHERS: list[Bad] = [
    Bad("no command", 2, "", lambda folder: ["tran"]),
    Bad("an unknown option", 2, "--verbos", lambda folder: ["config", "--verbos"]),
    Bad("an unknown output form", 2, "--output", lambda folder: ["config", "-o", "xml"]),
    Bad("a config that is a folder", 2, "raw: cannot be read", lambda folder: ["config", "-c", folder / "raw"]),
    Bad("a config that is not there", 3, "none.yaml", lambda folder: ["config", "-c", folder / "none.yaml"]),
    Bad("a config of a very long name", 2, "File name too long", lambda folder: ["config", "-c", "x" * 5000]),
    Bad("a resumption from nowhere", 3, "--resume", lambda f: [*small("train", f), "--resume", f / "nowhere"]),
    Bad("a resumption from a file", 3, "--resume", lambda f: [*small("train", f), "--resume", f / "small.yaml"]),
    Bad("a resumption from an empty word", 2, "--resume", lambda f: [*small("train", f), "--resume", ""]),
    Bad("hours below zero", 2, "train.max_hours", lambda f: [*small("train", f), "--max-hours", "-1"]),
    Bad("hours of text", 2, "max-hours", lambda f: [*small("train", f), "--max-hours", "long"]),
    Bad("a split of nobody", 2, "split", lambda f: ["eval", f / "run", "--split", "train"]),
    Bad("a launcher of nobody", 3, "no such command", lambda f: ["launch", "--", "mpirun-of-nobody"]),
    Bad("an exit folder that is a file", 4, "a file is in the way",
        lambda f: ["launch", "--exit-dir", f / "small.yaml", "--", "true"]),
    Bad("a run folder that is a file", 4, "a file is in the way",
        lambda f: small("train", f, f"output.dir={f / 'small.yaml'}")),
    Bad("a store over a file", 4, "is not a store", lambda f: small("prepare", f, f"data.store={f / 'small.yaml'}")),
    Bad("a world that was promised larger", 6, "launch.expected_size",
        lambda f: small("train", f, "launch.expected_size=64", f"output.dir={f / 'other'}")),
    Bad("a config nobody may read", 2, "small.yaml",
        denied("small.yaml", 0o000, lambda f: ["config", "-c", f / "small.yaml"]), stranger=True),
    Bad("a store nobody may read", 1, "Permission denied",
        denied("store/manifest.json", 0o000, lambda f: ["verify", f / "store"]), stranger=True),
    Bad("a folder nobody may enter", 2, "is not readable", denied("store", 0o000, lambda f: ["verify", f / "store"]),
        stranger=True),
    Bad("a data file nobody may read", 1, "Permission denied", denied("raw/g.npz", 0o000, npz), stranger=True),
    Bad("a folder that takes no store", 1, "Permission denied", denied(".", 0o555, npz), stranger=True),
    Bad("a folder that takes no run", 1, "Permission denied",
        denied(".", 0o555, lambda f: small("train", f, f"output.dir={f / 'other'}")), stranger=True),
    Bad("a run that may not step aside", 1, "Permission denied",
        denied(".", 0o555, lambda f: [*small("train", f), "--resume", "never"]), stranger=True),
    Bad("checkpoints that take no more", 1, "Permission denied",
        denied("run/checkpoints", 0o555, resumed(lambda checkpoints: None)), stranger=True),
]  # fmt: skip

CATALOGUE: list[Bad] = [
    *(Bad(f"config: {name}", code, says, config_text(content)) for name, content, code, says in TEXTS),
    *(Bad(f"override: {name}", 2, says, config_override(word)) for name, word, says in OVERRIDES),
    *(Bad(f"npz: {name}", 2, says, npz_arrays(members)) for name, members, says in ARRAYS),
    *(Bad(f"npz file: {name}", code, says, npz_file(damage)) for name, damage, code, says in FILES),
    *(Bad(f"ogb: {name}", code, says, ogb(damage)) for name, damage, code, says in OGB),
    *(Bad(f"store: {name}", code, says, store(damage)) for name, damage, code, says in STORES),
    *(Bad(f"run: {name}", code, says, evaluated(damage)) for name, damage, code, says in RUNS),
    *(Bad(f"checkpoint: {name}", code, says, resumed(damage)) for name, damage, code, says in CHECKPOINTS),
    *OTHERS,
]


@cache
def good() -> Path:
    """Return a folder with everything good in it: config, store, finished run, npz archive; made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="good inputs äöü "))  # a name that must be no trouble
    (folder / "small.yaml").write_text(SMALL.replace("STORE", "nowhere").replace("RUN", "nowhere"))
    (folder / "raw").mkdir()
    np.savez(folder / "raw" / "g.npz", **GRAPH)
    for command in ("prepare", "train"):
        ended = run(*small(command, folder))
        assert ended.code == 0, ended
    assert run(*npz(folder)).code == 0
    shutil.rmtree(folder / "new")
    return folder


@contextmanager
def own_copy() -> Iterator[Path]:
    """Yield a copy of what is good, to be damaged."""
    with tempfile.TemporaryDirectory(prefix="bad inputs äöü ") as name:
        folder = Path(name) / "here"
        shutil.copytree(good(), folder)
        folder.chmod(0o755)
        yield folder


def end_of(bad: Bad) -> tuple[Ended, list[str]]:
    """Return how the command on a bad input ended, and what it left behind that was not there before."""
    with own_copy() as folder:
        arguments = bad.build(folder)
        before = {str(path) for path in folder.rglob("*")}
        ended = as_stranger(folder, arguments) if bad.stranger else run(*arguments)
        folder.chmod(0o755)
        left = sorted({str(path) for path in folder.rglob("*")} - before)
        return ended, left


def as_stranger(folder: Path, arguments: list[object]) -> Ended:
    """Run a command in a child that gives up root's rights first, since rights do not bind root."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                for path in (folder.parent, folder, *folder.rglob("*")):
                    os.lchown(path, NOBODY, NOBODY)
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            ended = run(*arguments)
            os.write(writer, json.dumps([ended.code, ended.out[-2000:], ended.err[-20_000:]]).encode())
        except BaseException:
            os.write(writer, json.dumps([-1, "", traceback.format_exc()[-20_000:]]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return Ended(*json.loads(said))


def verdict(bad: Bad) -> str | None:
    """Return what is wrong with how a bad input is refused; None when all is as it should be."""
    ended, left = end_of(bad)
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if "Traceback" in ended.err:
        return f"a traceback: {ended.err}"
    if ended.code != bad.code:
        return f"exit code {ended.code}, not {bad.code}: {ended.err} {ended.out}"
    if not any(bad.says in line for line in errors):
        return f"no error line says {bad.says!r}: {ended.err}"
    if ended.out:
        return f"it prints to stdout: {ended.out}"
    allowed = (".lock", "checkpoints")  # what says who writes
    litter = [path for path in left if Path(path).name not in allowed]
    return f"it leaves {litter}" if litter else None


def run_all() -> tuple[int, int]:
    """Return (inputs, inputs that ended in a traceback or in another way than they must); say which."""
    wrong = 0
    for bad in CATALOGUE:
        if flaw := verdict(bad):
            wrong += 1
            print(f"{bad.name}: {flaw}", file=sys.stderr)
    return len(CATALOGUE), wrong
