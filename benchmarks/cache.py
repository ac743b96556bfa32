"""What the benchmarks keep outside the clone: the peers' environment, the big graph, its CSV files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIG_CONFIG = ROOT / "benchmarks" / "citation2-size.yaml"


def folder() -> Path:
    """Return the benchmarks' cache: $BENCH_CACHE, or a folder below the user's cache."""
    if chosen := os.environ.get("BENCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-trainer" / "bench"


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; ends the benchmark when it has not been made."""
    return _made(folder() / "peers" / "complete").parent / "bin" / "python"


def big_store() -> Path:
    """Return the store of the generated graph of ogbl-citation2's size."""
    return _made(folder() / "store" / "manifest.json").parent


def big_csv() -> Path:
    """Return the root of the same graph as OGB distributes ogbl-citation2: ROOT/ogbl_citation2/{raw,split}."""
    return _made(folder() / "csv" / "complete").parent


def _made(path: Path) -> Path:
    if not path.exists():
        sys.exit(f"{path} is not there: run `make bench-setup` first (about an hour on 2 cores, once)")
    return path


if __name__ == "__main__":
    print(folder())
