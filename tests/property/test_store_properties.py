"""Whatever is changed in a store's files, verify names exactly those files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.data import csr
from horovod_trainer.data.store import verify_store
from tests.raw import open_prepared


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "store"
    made = Synthetic(nodes=100, references=5.0, features=3, years=3)
    config = DataSection(source="synthetic", store=str(folder), negatives=3, synthetic=made, neighbour_max=True)
    return open_prepared(config).path


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_named_file_by_file(original: Path, data: st.DataObject) -> None:
    names = sorted(file.name for file in original.glob("*.npy"))
    victims = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "store"
        shutil.copytree(original, folder)
        for name in victims:
            content = bytearray((folder / name).read_bytes())
            at = data.draw(st.integers(0, len(content) - 1))
            kind = data.draw(st.sampled_from(["flip", "cut", "grow", "delete"]))
            if kind == "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            content = {"cut": content[:at], "grow": content + b"\0"}.get(kind, content)
            (folder / name).write_bytes(content)
            if kind == "delete":
                (folder / name).unlink()
        assert sorted(Path(problem.path).name for problem in verify_store(folder)) == sorted(victims)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 12), data=st.data())
def test_clean_up_and_symmetry_against_sets(n: int, data: st.DataObject) -> None:
    node = st.integers(0, n - 1)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=40))
    graph, *dropped = csr.distinct(csr.from_pairs(np.array(pairs, np.int64).reshape(-1, 2).T, n))
    kept = sorted({(u, v) for u, v in pairs if u != v})
    assert [tuple(edge) for edge in graph.pairs().T.tolist()] == kept
    assert len(kept) + sum(dropped) == len(pairs)
    assert [tuple(edge) for edge in csr.unordered(graph).pairs().T.tolist()] == sorted(
        {(min(pair), max(pair)) for pair in kept}
    )
    rows, cols = csr.symmetric(graph).pairs()
    mutual = sorted({edge for u, v in kept for edge in ((u, v), (v, u))})
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == mutual
    assert np.array_equal(np.repeat(np.arange(n), np.diff(csr.pointers(rows, n))), rows)
