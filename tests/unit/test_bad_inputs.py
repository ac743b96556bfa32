"""Every bad input of the catalogue: one clear error, its exit code, no traceback, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import bad_inputs
from tests.bad_inputs import CATALOGUE, Bad, verdict

pytestmark = pytest.mark.usefixtures("_threads_put_back")


@pytest.fixture(scope="module", autouse=True)
def _good_ones_removed() -> Iterator[None]:
    import shutil

    yield
    shutil.rmtree(bad_inputs.good())
    bad_inputs.good.cache_clear()


@pytest.mark.parametrize("bad", CATALOGUE, ids=lambda bad: bad.name)
def test_a_bad_input_is_refused(bad: Bad) -> None:
    assert verdict(bad) is None


def test_the_catalogue_is_long_and_no_input_is_there_twice() -> None:
    assert len(CATALOGUE) >= 100
    assert len({bad.name for bad in CATALOGUE}) == len(CATALOGUE)
