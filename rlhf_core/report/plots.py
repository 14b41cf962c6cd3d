"""Plots of a round, drawn for a phone: 900 pixels wide, large type, lines named where they end.

Figures are objects, so that no global state of matplotlib is touched.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhf_core.report.view import NOT_MEASURED, CalibrationPoint, Steps

# After Okabe and Ito, told apart with any kind of colour vision; the green is darkened to be read as text.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#007A5A"
INK, GREY = "#222222", "#767676"
SIZE, SMALL = 19, 16


def gold_and_proxy(steps: Steps) -> Figure:
    """The reward that is optimised above the gold that is only watched, over steps."""
    figure, (above, below) = _panels(2)
    _series(above, steps, {"objective/scores": ("", BLUE)})
    _title(above, "Proxy reward (optimised)")
    _series(below, steps, {"objective/gold": ("", VERMILION)})
    _title(below, "Gold (watched, never optimised)")
    _steps_axis(below, steps)
    return figure


def kl(steps: Steps) -> Figure:
    """KL a token to the reference, above KL a completion to it and to the round's start, over steps."""
    figure, (above, below) = _panels(2)
    _series(above, steps, {"objective/kl": ("", BLUE)})
    _title(above, "KL to the reference, nats a token")
    _series(
        below,
        steps,
        {"objective/kl_sequence": ("reference", BLUE), "objective/kl_to_start": ("start", GREEN)},
    )
    _title(below, "KL to reference and round's start, nats a completion")
    _steps_axis(below, steps)
    return figure


def calibration(points: Sequence[CalibrationPoint]) -> Figure:
    """How often the reward model's choice is right against how sure it was, above the number of pairs."""
    figure, (above, below) = _panels(2, ratios=(3, 1))
    above.plot([0.5, 1], [0.5, 1], color=GREY, linestyle=(0, (4, 4)), linewidth=2)
    sure, right = [p.confidence for p in points], [p.accuracy for p in points]
    above.plot(sure, right, "o-", color=BLUE, linewidth=3, markersize=11)
    above.set(xlim=(0.49, 1.01), ylim=(min([0.45, *right]) - 0.05, 1.05))
    _title(above, "Share of pairs it orders rightly (dashed: as it claims)")
    below.vlines(sure, 0, [p.pairs for p in points], color=BLUE, linewidth=14)
    for point in points:
        _note(below, (point.confidence, point.pairs), f"{point.pairs}", (0, 4), ha="center", va="bottom")
    below.set_ylim(0, 1.45 * max((p.pairs for p in points), default=1))
    below.set_yticks([])
    _title(below, "Pairs")
    below.set_xlabel("probability the reward model gives its choice", fontsize=SIZE, color=INK)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG: the same figure, the same bytes."""
    figure.savefig(path, format="png", metadata={"Software": None})


def _panels(count: int, ratios: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, 7.5), dpi=100, layout="constrained", facecolor="white")
    axes = list(figure.subplots(count, 1, sharex=True, height_ratios=ratios))
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=SMALL, colors=INK)
        one.grid(axis="y", color="#E3E3E3", linewidth=1)
        one.set_axisbelow(True)
        one.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return figure, axes


def _series(axes: Axes, steps: Steps, lines: dict[str, tuple[str, str]]) -> None:
    """Each metric as a line, its last value and its label at its end; two labels never touch."""
    ends = []
    for metric, (label, color) in lines.items():
        found = [
            (step, numbers[metric]) for step, numbers in steps if math.isfinite(numbers.get(metric, math.nan))
        ]
        if found:
            axes.plot(*zip(*found, strict=True), "o-", color=color, linewidth=3, markersize=6)
            ends.append((found[-1], label, color))
    if not ends:
        axes.text(
            0.5,
            0.5,
            NOT_MEASURED,
            transform=axes.transAxes,
            color=GREY,
            fontsize=SIZE,
            ha="center",
            va="center",
        )
        axes.set_yticks([])
        return
    ends.sort(key=lambda end: end[0][1])
    for place, ((step, value), label, color) in enumerate(ends):
        va, shift = ("center", 0) if len(ends) == 1 else ("top", -3) if place == 0 else ("bottom", 3)
        text = f"{value:.3g}\n{label}".strip()
        _note(axes, (step, value), text, (12, shift), ha="left", va=va, color=color)


def _note(
    axes: Axes,
    at: tuple[float, float],
    text: str,
    offset: tuple[float, float],
    *,
    ha: str,
    va: str,
    color: str = INK,
) -> None:
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va=va,
        color=color,
        fontsize=SIZE,
        annotation_clip=False,
    )


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=SIZE, color=INK, pad=12)


def _steps_axis(axes: Axes, steps: Steps) -> None:
    axes.set_xlim(steps[0][0] - 0.5, steps[-1][0] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel("step of the policy update", fontsize=SIZE, color=INK)
