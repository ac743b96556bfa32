"""The curves of a run as one PNG (L3: matplotlib, drawn without a display and loaded when used)."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horovod_trainer.documents import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
Curve = NDArray[np.float64]

BLUE, ORANGE, INK, FAINT = "#2b6cb0", "#dd6b20", "#2d3748", "#a0aec0"
STYLE: Any = {  # matplotlib types its keys as a literal of three hundred names
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture everywhere
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}
MAX_POINTS = 5000  # more cannot be told apart at this width
NAMES = {"mrr": "MRR", "auc": "AUC"}


def plot_run(metrics: list[Row], out: Path, title: str = "") -> None:
    """Draw the loss per step beside the validation MRR (AUC without one) per epoch, and the test figure, into a PNG.

    Takes the rows of metrics.jsonl; a run without steps or validations leaves its half empty. Raises OSError.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.03)
        figure = Figure(figsize=(10, 4), dpi=160, layout=layout)  # 1600 pixels: sharp at README width
        left, right = figure.subplots(1, 2)
        _draw_loss(left, [row for row in metrics if row.get("event") == "step"])
        _draw_ranking(right, metrics)
        if title:
            figure.suptitle(title, x=0.015, ha="left", fontsize=12, fontweight="bold", parse_math=False)
        image = BytesIO()
        figure.savefig(image, format="png")
    write_atomic(out, image.getvalue())


def _draw_loss(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("Training loss per step")
    axes.set_xlabel("step")
    step, loss = _curve(rows, "step", "loss")
    if not len(step):
        return
    stride = -(-len(step) // MAX_POINTS)
    axes.plot(step[::stride], loss[::stride], color=BLUE, alpha=0.25, linewidth=0.8, label="each step")
    axes.plot(step[::stride], smoothed(loss)[::stride], color=BLUE, linewidth=2, label="smoothed")
    axes.legend()
    low, high = loss.min(), np.quantile(loss, 0.995)  # the first few steps may be far above all others
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _draw_ranking(axes: Axes, metrics: list[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    valid = [row for row in metrics if row.get("event") == "valid"]
    test = [row for row in metrics if row.get("event") == "test"][-1:]
    key = "mrr" if any("mrr" in row for row in valid + test) else "auc"
    axes.set_title(f"{NAMES[key]} per epoch")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    epoch, value = _curve(valid, "epoch", key)
    if len(epoch):
        marker = "o" if len(epoch) <= 60 else ""  # beyond that the dots would hide the line
        axes.plot(epoch, value, color=BLUE, linewidth=2, marker=marker, markersize=4, label="validation")
    best, result = _curve(test, "epoch", key)
    if len(best):
        axes.axhline(result[0], color=ORANGE, linewidth=1.2, linestyle=(0, (4, 3)))
        label = f"test {result[0]:.4f}, weights of epoch {best[0]:.0f}"
        axes.plot(best, result, color=ORANGE, linestyle="none", marker="*", markersize=14, label=label)
    if len(epoch) or len(best):
        axes.margins(y=0.1)
        axes.legend(loc="lower right")


def smoothed(values: Curve) -> Curve:
    """Return the mean of each value [N] and its neighbours within N / 50 on either side, fewer at the ends."""
    reach = len(values) // 50
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    first, last = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    means: Curve = (total[last] - total[first]) / (last - first)
    return means


def _curve(rows: list[Row], x: str, y: str) -> tuple[Curve, Curve]:
    """Return the finite points of the rows that have both."""
    points = [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]
    array = np.array(points, np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]
