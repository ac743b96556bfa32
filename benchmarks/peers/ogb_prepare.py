"""OGB's own class on its raw files, and the symmetric graph that a user makes next; each timed.

Runs in the peers' environment. The last line is one JSON object. The root is a fresh folder of links to the raw files,
because OGB leaves its result beside them.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

os.environ["OUTDATED_IGNORE"] = "1"  # ogb would ask PyPI for its newest version

import torch
from ogb.linkproppred import PygLinkPropPredDataset
from torch_geometric.utils import to_undirected

NAME, FOLDER = "ogbl-citation2", "ogbl_citation2"


def main() -> None:
    """Process the files, then make the graph symmetric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True, help="root of the files: the folder that holds " + FOLDER)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result, which must not exist")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    shutil.copytree(
        args.csv / FOLDER, args.out / FOLDER, copy_function=link, ignore=shutil.ignore_patterns("processed")
    )
    # since torch 2.6 the class cannot load what it saved (ogb issue 497); nothing may be asked on the terminal
    torch.load = functools.partial(torch.load, weights_only=False)
    builtins.input = refuse
    seconds = {}
    started = time.perf_counter()
    dataset = PygLinkPropPredDataset(NAME, root=str(args.out))
    seconds["process"] = time.perf_counter() - started
    peak, processed_at = peak_gib(), time.monotonic()
    started = time.perf_counter()
    graph = to_undirected(dataset[0].edge_index, num_nodes=dataset[0].num_nodes)
    seconds["symmetric"] = time.perf_counter() - started
    print(
        json.dumps(
            {
                "seconds": seconds, "processed_at": processed_at, "process_peak_gib": peak,
                "peak_gib": peak_gib(), "nodes": dataset[0].num_nodes,
                "edges": dataset[0].edge_index.shape[1], "graph_edges": graph.shape[1],
            }
        )
    )  # fmt: skip


def link(source: str, target: str) -> None:
    """Make a link in place of a copy."""
    os.symlink(os.path.abspath(source), target)


def refuse(*_: Any) -> str:
    """Stand in for input(): a question would mean that the folder is not as OGB distributes it."""
    raise SystemExit("OGB's class asks a question: the folder is not complete")


def peak_gib() -> float:
    """Return the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
