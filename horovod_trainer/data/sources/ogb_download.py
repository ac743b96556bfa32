"""Fetching an OGB archive, only when the user asked for it: sizes checked, unpacked safely, whole or not at all."""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from horovod_trainer.data.archives import unpack
from horovod_trainer.data.sources import Progress
from horovod_trainer.errors import Conflict, InvalidInput, Problem, Unreachable

BASE = "https://snap.stanford.edu/ogb/data/linkproppred"
LARGEST = 1 << 35  # bytes unpacked; citation2, the largest, has about 4 GiB
_BLOCK = 1 << 20


def download(root: Path, name: str, archive: str, progress: Progress) -> Path:
    """Return `root`/`name`, made of the folder in BASE/`archive`.zip.

    Raises Conflict when that exists, Unreachable when the server cannot be reached or sends fewer bytes than it
    announced, InvalidInput for an archive with path tricks or without that folder.
    """
    if (root / name).exists():
        raise Conflict(Problem(str(root / name), "exists, but holds no data set (no folder split); move it away first"))
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}.", suffix=".partial") as scratch:
        box = Path(scratch) / f"{archive}.zip"
        _fetch(f"{BASE}/{archive}.zip", box, progress)
        unpack(box, Path(scratch) / "out", LARGEST, progress)
        folder = Path(scratch) / "out" / archive
        if not (folder / "split").is_dir():
            raise InvalidInput(Problem(box.name, f"holds no folder {archive}/split"))
        os.rename(folder, root / name)
    return root / name


def _fetch(url: str, file: Path, progress: Progress) -> None:
    """Write what is at `url` to `file`, whole."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response, file.open("wb") as out:
            announced = int(response.headers.get("Content-Length") or 0)
            free = shutil.disk_usage(file.parent).free
            if announced > free:
                raise InvalidInput(Problem(str(file.parent), f"needs {announced} bytes for {url}", f"{free} free"))
            done = 0
            while block := response.read(_BLOCK):
                out.write(block)
                done += len(block)
                progress("download", done, max(done, announced))
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as failure:
        raise Unreachable(Problem(url, f"could not be downloaded: {failure}")) from None
    if announced and done != announced:
        raise Unreachable(Problem(url, f"ended after {done} of {announced} bytes"))
