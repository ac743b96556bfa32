"""The plot of a run: a readable PNG, whatever a run managed to measure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_trainer.plots import plot_run, smoothed

Row = dict[str, Any]


def run(epochs: int, steps: int, key: str = "mrr") -> list[Row]:
    """Return the rows of a small run with its test figure."""
    step = [{"event": "step", "step": n, "epoch": 1, "loss": 1 / n} for n in range(1, steps + 1)]
    valid = [{"event": "valid", "step": n, "epoch": n, key: 0.1 * n} for n in range(1, epochs + 1)]
    return [*step, *valid, {"event": "test", "step": steps, "epoch": epochs, key: 0.3}]


def pixels(file: Path) -> Any:
    from matplotlib.image import imread

    return imread(file)


def test_the_plot_is_a_wide_png_with_both_curves_and_the_test_figure(tmp_path: Path) -> None:
    plot_run(run(3, 40), tmp_path / "curves.png", title="pubmed, 2 ranks")
    image = pixels(tmp_path / "curves.png")
    assert image.shape == (640, 1600, 4)
    blue = np.abs(image[..., :3] - np.array([0x2B, 0x6C, 0xB0]) / 255).max(axis=-1) < 0.02
    orange = np.abs(image[..., :3] - np.array([0xDD, 0x6B, 0x20]) / 255).max(axis=-1) < 0.02
    assert blue[:, :800].sum() > 500  # loss
    assert blue[:, 800:].sum() > 500  # validation
    assert orange[:, 800:].sum() > 200  # test
    assert orange[:, :800].sum() == 0
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        run(1, 1),
        run(2, 30, "auc"),
        run(2, 0),
        run(0, 5)[:-1],
        run(100, 20_000),
        [{"event": "step", "step": 1, "loss": None}, {"event": "valid", "epoch": 1, "mrr": None}, {"event": "run"}],
        [{"event": "step", "step": n, "loss": 0.7} for n in range(9)],
    ],
    ids=["nothing", "one step", "auc", "no steps", "unfinished", "long", "nulls", "flat"],
)
@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(rows: list[Row], tmp_path: Path) -> None:
    plot_run(rows, tmp_path / "new" / "curves.png")
    assert pixels(tmp_path / "new" / "curves.png").shape[1] == 1600


def test_smoothing_keeps_the_mean_of_its_neighbourhood() -> None:
    assert smoothed(np.arange(10.0)).tolist() == list(range(10))
    values = np.zeros(100)
    values[50] = 5.0
    assert smoothed(values)[46:55].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    np.testing.assert_allclose(smoothed(np.full(200, 3.0)), 3.0)
