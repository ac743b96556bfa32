"""A citation-like generator: topics, preferential attachment, years, features that carry the topic.

Papers appear in order of year, ever more of them. Most references go to earlier papers of the same topic, recent ones
first, or are copied: from the reference list of the paper so found, which is preferential attachment (Kleinberg et al.
1999, "The web as a graph"), or from that of a paper already cited, which is co-citation. A pure function of the seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from horovod_trainer.config import DataSection, Synthetic
from horovod_trainer.counters import below64, derive_key, fold64
from horovod_trainer.data import csr
from horovod_trainer.data.graph import RawGraph
from horovod_trainer.data.sources import Progress
from horovod_trainer.jit import compiled

GROWTH = 1.07  # papers per year over the year before
FOREIGN = 0.1  # share of references to any topic
COCITED = 0.25  # share of references taken from the list of a paper already cited
COPIED = 0.3  # share of the rest copied from the list of the paper found: preferential attachment
NOISE = 1.5  # standard deviation of a feature around its topic's centre, whose entries have deviation 1
_TRIES = 8
_ROWS = 1 << 15  # of one random stream: changing it changes the data


def fingerprint(config: DataSection, progress: Progress) -> dict[str, str]:
    """Return nothing: the generator has no raw files."""
    return {}


def load(config: DataSection, progress: Progress) -> RawGraph:
    """Return the generated graph, with directed citations, years and features of type config.feature_type."""
    settings = config.synthetic
    rng = np.random.Generator(np.random.Philox(settings.seed))
    n = settings.nodes
    weight = GROWTH ** (np.arange(settings.years) - settings.years + 1.0)
    year = settings.first_year + np.sort(rng.choice(settings.years, n, p=weight / weight.sum())).astype(np.int32)
    topic = rng.integers(settings.topics, size=n, dtype=np.int32)
    wanted = rng.poisson(rng.gamma(2.0, settings.references / 2.0, n))
    name_of = rng.permutation(n).astype(np.int32)  # ids say nothing about age
    progress("citations", 0, 1)
    edges = _citations(topic, wanted, settings)
    progress("citations", 1, 1)
    for row in edges:
        row[:] = name_of[row]
    by_name = np.argsort(name_of)
    topic, year = topic[by_name], year[by_name]
    return RawGraph(
        name=f"synthetic-{n}", kind="synthetic", origin=f"generator, seed {settings.seed}", licence="none needed",
        num_nodes=n, edges=edges, directed=True, year=year,
        features=_features(topic, settings, config.feature_type, progress),
    )  # fmt: skip


def _citations(topic: NDArray[np.int32], wanted: NDArray[np.int64], settings: Synthetic) -> NDArray[np.int64]:
    """Return citations [2, E] between papers numbered by age; fewer than wanted where no new paper was found."""
    order = np.argsort(topic, kind="stable").astype(np.int32)
    indptr = np.zeros(len(topic) + 1, np.int64)
    np.cumsum(wanted, out=indptr[1:])
    key = np.uint64(derive_key(settings.seed, 1))
    made, cited = _cite(topic, csr.pointers(np.sort(topic), settings.topics), order, indptr, key)
    target = cited[cited >= 0]
    del cited
    return np.stack([np.repeat(np.arange(len(topic)), made), target])


@compiled
def _cite(topic: Any, topic_start: Any, by_topic: Any, indptr: Any, key: Any) -> Any:
    """Fill each paper's slots of `cited` from the front; -1 is an empty slot."""
    n = topic.shape[0]
    cited = np.full(indptr[n], -1, np.int32)
    made = np.zeros(n, np.int64)
    seen = np.zeros(topic_start.shape[0] - 1, np.int64)  # papers of each topic so far
    for i in range(n):
        paper_key = fold64(key, i)
        draw = 0
        start = indptr[i]
        for _ in range(indptr[i + 1] - start):
            for _ in range(_TRIES):
                if i == 0:
                    break
                found = _find_paper(i, topic[i], topic_start, by_topic, seen, indptr, cited, made, paper_key, draw)
                draw += 6
                fresh = found >= 0
                for e in range(start, start + made[i]):
                    fresh = fresh and cited[e] != found
                if fresh:
                    cited[start + made[i]] = found
                    made[i] += 1
                    break
        seen[topic[i]] += 1
    return made, cited


@compiled
def _find_paper(
    i: Any, topic: Any, topic_start: Any, by_topic: Any, seen: Any, indptr: Any, cited: Any, made: Any, key: Any,
    draw: Any,
) -> Any:  # fmt: skip
    """Return an earlier paper than i, or -1."""
    dice = below64(key, draw, 1 << 30) / (1 << 30)
    if dice < COCITED and made[i] > 0:
        via = np.int64(cited[indptr[i] + below64(key, draw + 1, made[i])])
        copies = True
    else:
        if dice >= 1.0 - FOREIGN or seen[topic] == 0:
            via = below64(key, draw + 1, i)
        else:  # the later of two draws: recent papers are cited more
            rank = max(below64(key, draw + 1, seen[topic]), below64(key, draw + 2, seen[topic]))
            via = np.int64(by_topic[topic_start[topic] + rank])
        copies = below64(key, draw + 3, 1 << 30) < COPIED * (1 << 30)
    if not copies:
        return via
    if made[via] == 0:
        return -1 if dice < COCITED and made[i] > 0 else via
    return np.int64(cited[indptr[via] + below64(key, draw + 4, made[via])])


def _features(topic: NDArray[np.int32], settings: Synthetic, dtype: DTypeLike, progress: Progress) -> NDArray[Any]:
    """Return features [N, F]: the topic's centre plus noise, block by block."""
    centres = _normal(settings.seed, 2, 0, (settings.topics, settings.features))
    out = np.empty((len(topic), settings.features), dtype)
    for first in range(0, len(topic), _ROWS):
        block = centres[topic[first : first + _ROWS]]
        out[first : first + _ROWS] = block + np.float32(NOISE) * _normal(settings.seed, 3, first, block.shape)
        progress("generate features", min(len(topic), first + _ROWS), len(topic))
    return out


def _normal(seed: int, stream: int, block: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.Generator(np.random.Philox(derive_key(seed, stream, block))).standard_normal(shape, np.float32)
