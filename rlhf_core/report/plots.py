"""Plots of a round, drawn for a phone: 900 pixels wide, large type, lines named where they end.

Figures are objects, so that no global state of matplotlib is touched; `drawing` writes them down.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhf_core.report.view import NOT_MEASURED, CalibrationPoint, Scores, Steps

# After Okabe and Ito, told apart with any kind of colour vision; the green is darkened to be read as text.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#007A5A"
INK, GREY, FAINT = "#222222", "#767676", "#E3E3E3"
SIZE, SMALL = 19, 16
NUM_BINS = 24
MAX_MARKED = 60
"""More points than these are a line without dots."""


def gold_and_proxy(steps: Steps) -> Figure:
    """The reward that is optimised above the gold that is only watched, over steps."""
    figure, (above, below) = _panels(2)
    _series(above, steps, {"objective/scores": ("", BLUE)})
    _title(above, "Proxy reward (optimised)")
    _series(below, steps, {"objective/gold": ("", VERMILION)})
    _title(below, "Gold (watched, never optimised)")
    _steps_axis(below, steps)
    return figure


def over_sqrt_kl(steps: Steps) -> Figure:
    """Proxy and gold over the square root of KL to the reference, as in Gao et al. (2023).

    KL is estimated from samples, so that it may come out below zero: that is drawn at zero.
    """
    travelled = [
        (math.sqrt(max(0.0, numbers["objective/kl_sequence"])), numbers)
        for _, numbers in steps
        if math.isfinite(numbers.get("objective/kl_sequence", math.nan))
    ]
    figure, (above, below) = _panels(2)
    _series(above, travelled, {"objective/scores": ("", BLUE)}, style="o")
    _title(above, "Proxy reward (optimised)")
    _series(below, travelled, {"objective/gold": ("", VERMILION)}, style="o")
    _title(below, "Gold (watched, never optimised)")
    below.set_xlabel("√KL to the reference, KL in nats a completion", fontsize=SIZE, color=INK)
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


def entropy_and_length(steps: Steps) -> Figure:
    """What the text is like from outside: the policy's entropy above the response length, over steps."""
    figure, (above, below) = _panels(2)
    _series(above, steps, {"objective/entropy": ("", BLUE)})
    _title(above, "Entropy, nats a token")
    _series(below, steps, {"rollout/response_length": ("", GREEN)})
    _title(below, "Response length, tokens")
    _steps_axis(below, steps)
    return figure


def histograms(scores: Mapping[str, Scores]) -> Figure:
    """How each score is spread over the held-out completions, of both policies in the same bins."""
    figure, panels = _panels(len(scores), sharex=False)
    for axes, (name, found) in zip(panels, scores.items(), strict=True):
        edges = _edges(found.before + found.after)
        axes.hist(found.before, edges, histtype="stepfilled", color=GREY, alpha=0.4, label="champion")
        axes.hist(found.after, edges, histtype="step", color=BLUE, linewidth=3, label="candidate")
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=SMALL, labelcolor=INK)
        _title(axes, f"{name.capitalize()}, number of completions")
    return figure


def _edges(values: Sequence[float]) -> list[float]:
    """Bins of one width that hold all values; a half each way around them if they are one value."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return [low + (high - low) * place / NUM_BINS for place in range(NUM_BINS)] + [high]


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


def _panels(
    count: int, ratios: Sequence[float] | None = None, sharex: bool = True
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, 7.5), dpi=100, facecolor="white")
    figure.set_layout_engine("constrained", hspace=0.08)
    axes = list(figure.subplots(count, 1, sharex=sharex, height_ratios=ratios, squeeze=False)[:, 0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(GREY)
        one.tick_params(labelsize=SMALL, colors=INK)
        one.grid(axis="y", color=FAINT, linewidth=1)
        one.set_axisbelow(True)
        one.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return figure, axes


def _series(
    axes: Axes,
    points: Sequence[tuple[float, dict[str, float]]],
    lines: dict[str, tuple[str, str]],
    style: str = "",
) -> None:
    """Each metric as a line or as dots, its last value and its label at its end; two labels never touch."""
    ends = []
    for metric, (label, color) in lines.items():
        found = [
            (x, numbers[metric]) for x, numbers in points if math.isfinite(numbers.get(metric, math.nan))
        ]
        if found:
            drawn = style or ("o-" if len(found) <= MAX_MARKED else "-")
            axes.plot(
                *zip(*found, strict=True),
                drawn,
                color=color,
                linewidth=3,
                markersize=6 if "-" in drawn else 10,
            )
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
    for place, ((x, value), label, color) in enumerate(ends):
        va, shift = ("center", 0) if len(ends) == 1 else ("top", -3) if place == 0 else ("bottom", 3)
        text = f"{value:.3g}\n{label}".strip()
        _note(axes, (x, value), text, (12, shift), ha="left", va=va, color=color)


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
