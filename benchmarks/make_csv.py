"""Write the big graph as OGB distributes ogbl-citation2, gzipped CSV and torch.save files; quick when it is there.

Part of `make bench-setup`. Both OGB's own class and our `prepare` read the folder without a download or a prompt.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import igzip_threaded
from numpy.typing import NDArray

from benchmarks import cache
from horovod_trainer.data.store import Store, open_store
from horovod_trainer.jit import compiled

DATASET = "ogbl_citation2"
DECIMALS = 6  # of a feature, as in OGB's file
LEVEL = 3  # of compression: within 6 % of gzip's default size, 60 times as quick
_ROWS = 1 << 14
_WIDEST = 24  # characters of a number and its separator


def write_dataset(store: Store, root: Path) -> Path:
    """Write ROOT/ogbl_citation2/{RELEASE_v1.txt, raw, split/time, mapping} and return that folder.

    Training edges come in a random order, the same in the CSV and in the split: the hardest case for a reader that
    sorts them.
    """
    folder = root / DATASET
    for part in ("raw", "split/time", "mapping"):
        (folder / part).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    order = np.random.default_rng(0).permutation(len(store.train_source))
    train = np.stack([store.train_source[order], store.train_target[order]])
    assert store.year is not None  # the generator dates its papers
    counts = ((store.num_nodes, "num-node-list"), (train.shape[1], "num-edge-list"))
    tables = [(np.array([count]), name) for count, name in counts]
    for table, name in [*tables, (train.T, "edge"), (store.year, "node_year"), (store.features, "node-feat")]:
        write_csv(folder / "raw" / f"{name}.csv.gz", table.reshape(len(table), -1))
    parts = {"train": {"source_node": train[0], "target_node": train[1]}}
    save(folder, "train", parts["train"])
    for part in ("valid", "test"):
        held_out = store.held_out("valid" if part == "valid" else "test")
        assert held_out.negatives is not None
        edge = {"source_node": held_out.edge[:, 0], "target_node": held_out.edge[:, 1]}
        save(folder, part, {**edge, "target_node_neg": held_out.negatives})
    return folder


def save(folder: Path, part: str, content: dict[str, NDArray[np.int32]]) -> None:
    """Write a part of the split: numpy arrays of int64 in a torch.save file, as OGB's are."""
    torch.save({name: ids.astype(np.int64) for name, ids in content.items()}, folder / f"split/time/{part}.pt")


def write_csv(file: Path, table: NDArray[Any]) -> None:
    """Write numbers [rows, columns]: whole ones as such, others with six decimals."""
    decimals = DECIMALS if table.dtype.kind == "f" else 0
    rows = max(1, _ROWS * 128 // table.shape[1])
    text = np.empty(rows * table.shape[1] * _WIDEST, np.uint8)
    with igzip_threaded.open(file, "wb", compresslevel=LEVEL, threads=1) as out:  # type: ignore[no-untyped-call]
        for first in range(0, len(table), rows):
            length = _print(table[first : first + rows].astype(np.float64), decimals, text)
            out.write(text[:length].data)


@compiled
def _print(table: Any, decimals: Any, text: Any) -> Any:
    """Write the table's lines to `text` and return their length in bytes."""
    length = 0
    scale = 10.0**decimals
    digits = np.empty(20, np.uint8)
    for i in range(table.shape[0]):
        for j in range(table.shape[1]):
            left = np.int64(np.rint(abs(table[i, j]) * scale))
            if table[i, j] < 0 and left > 0:
                text[length] = 45  # -
                length += 1
            count = 0
            while left > 0 or count <= decimals:
                digits[count] = 48 + left % 10  # 0 to 9
                left //= 10
                count += 1
            for k in range(count - 1, -1, -1):
                text[length] = digits[k]
                length += 1
                if k == decimals and k > 0:
                    text[length] = 46  # .
                    length += 1
            text[length] = 44  # ,
            length += 1
        text[length - 1] = 10  # end of line
    return length


def main() -> None:
    """Write the files unless they are there, of this very store."""
    store = open_store(cache.big_store())
    root = cache.folder() / "csv"
    stamp = root / "complete"
    if stamp.is_file() and stamp.read_text() == store.manifest["digest"]:
        print(f"== the big graph's CSV files in {root} are there", file=sys.stderr)
        return
    print(f"== writing the big graph's CSV files to {root} (some minutes)", file=sys.stderr)
    shutil.rmtree(root, ignore_errors=True)
    write_dataset(store, root)
    stamp.write_text(store.manifest["digest"])


if __name__ == "__main__":
    main()
