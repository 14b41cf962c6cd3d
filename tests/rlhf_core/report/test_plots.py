import math
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rlhf_core.report.drawing import save_png
from rlhf_core.report.plots import (
    calibration,
    entropy_and_length,
    gold_and_proxy,
    histograms,
    kl,
    over_sqrt_kl,
)
from rlhf_core.report.view import CalibrationPoint, Scores, Steps

STEPS: Steps = [
    (
        step,
        {
            "objective/scores": 0.1 * step,
            "objective/gold": 0.2 * step,
            "objective/kl": 0.01 * step,
            "objective/kl_sequence": 0.4 * step,
            "objective/kl_to_start": 0.4 * step + 0.01,
            "objective/entropy": 3 - 0.1 * step,
            "rollout/response_length": 20 + step,
        },
    )
    for step in range(4)
]
SCORES = {"proxy": Scores([0.0, 0.0, 1.2], [1.0, 1.2, 2.4]), "gold": Scores([0.5], [0.5])}
POINTS = [CalibrationPoint(0.6, 0.5, 30), CalibrationPoint(0.9, 1.0, 4)]


def _lines(figure: Figure) -> list[list[tuple[list[float], list[float]]]]:
    """The points of every line of every panel."""
    return [
        [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axes.lines]
        for axes in figure.axes
    ]


def _texts(figure: Figure) -> list[list[str]]:
    return [[text.get_text() for text in axes.texts] for axes in figure.axes]


def test_proxy_and_gold_have_a_panel_each_over_the_same_steps() -> None:
    figure = gold_and_proxy(STEPS)
    steps = [0.0, 1.0, 2.0, 3.0]
    ((proxy,), (gold,)) = _lines(figure)
    assert proxy == (steps, pytest.approx([0, 0.1, 0.2, 0.3]))
    assert gold == (steps, pytest.approx([0, 0.2, 0.4, 0.6]))
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert _texts(figure) == [["0.3"], ["0.6"]]


def test_proxy_and_gold_are_dots_over_the_root_of_kl() -> None:
    # KL of 0, 0.25 and 4 nats lies at 0, 0.5 and 2; an estimate below zero at zero; an unknown one nowhere.
    numbers = [(0.0, 1.0), (0.25, 2.0), (4.0, 3.0), (-0.01, 4.0), (math.nan, 5.0)]
    steps = [
        (step, {"objective/kl_sequence": kl, "objective/scores": score, "objective/gold": -score})
        for step, (kl, score) in enumerate(numbers)
    ]
    figure = over_sqrt_kl([*steps, (5, {"objective/scores": 6.0})])
    ((proxy,), (gold,)) = _lines(figure)
    assert proxy == ([0.0, 0.5, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0])
    assert gold == ([0.0, 0.5, 2.0, 0.0], [-1.0, -2.0, -3.0, -4.0])
    assert {line.get_linestyle() for axes in figure.axes for line in axes.lines} == {"None"}


def test_entropy_and_length_have_a_panel_each() -> None:
    ((entropy,), (length,)) = _lines(entropy_and_length(STEPS))
    assert entropy[1] == pytest.approx([3, 2.9, 2.8, 2.7])
    assert length[1] == [20, 21, 22, 23]


def test_before_and_after_are_counted_in_the_same_bins() -> None:
    figure = histograms(SCORES)
    proxy, gold = figure.axes
    # 24 bins from 0 to 2.4, each 0.1 wide. Corners of an outline: two for each bin, and its two ends.
    outlines = [patch.get_path().vertices for patch in proxy.patches]
    assert {round(float(x), 6) for line in outlines for x in line[:, 0]} == {
        round(0.1 * place, 6) for place in range(25)
    }
    assert [line[:, 1].max() for line in outlines] == [2, 1]
    # All scores are one value: the bins go half a point each way.
    assert {float(patch.get_path().vertices[:, 0].min()) for patch in gold.patches} == {0.0}
    assert {float(patch.get_path().vertices[:, 0].max()) for patch in gold.patches} == {1.0}
    assert [text.get_text() for text in proxy.get_legend().get_texts()] == ["champion", "candidate"]


def test_many_steps_are_a_line_without_dots() -> None:
    figure = gold_and_proxy([(step, STEPS[1][1]) for step in range(61)])
    assert {line.get_marker() for axes in figure.axes for line in axes.lines} == {"None"}


def test_kl_to_reference_and_start_share_a_panel_and_are_named_at_their_ends() -> None:
    figure = kl(STEPS)
    (a_token,), (reference, start) = _lines(figure)
    assert a_token[1] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert reference[1] == pytest.approx([0, 0.4, 0.8, 1.2])
    assert start[1] == pytest.approx([0.01, 0.41, 0.81, 1.21])
    assert _texts(figure) == [["0.03"], ["1.2\nreference", "1.21\nstart"]]


@pytest.mark.parametrize("ahead", [-0.01, 0.0, 0.01])
def test_labels_of_lines_that_end_together_do_not_touch(ahead: float) -> None:
    steps = [(step, numbers | {"objective/kl_to_start": 0.4 * step + ahead}) for step, numbers in STEPS]
    figure = kl(steps)
    figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in figure.axes[1].texts)
    assert not first.overlaps(second)


def test_what_was_never_logged_is_said_not_to_be_measured() -> None:
    steps = [(step, {"objective/scores": numbers["objective/scores"]}) for step, numbers in STEPS]
    figure = gold_and_proxy(steps)
    assert [len(panel) for panel in _lines(figure)] == [1, 0]
    assert _texts(figure) == [["0.3"], ["not measured"]]


def test_a_value_that_is_not_finite_is_left_out() -> None:
    steps = [*STEPS, (4, STEPS[3][1] | {"objective/gold": math.nan, "objective/scores": math.inf})]
    ((proxy,), (gold,)) = _lines(gold_and_proxy(steps))
    assert proxy[0] == gold[0] == [0, 1, 2, 3]


def test_calibration_draws_accuracy_over_confidence_and_the_pairs_below() -> None:
    figure = calibration(POINTS)
    (diagonal, found), _ = _lines(figure)
    assert diagonal == ([0.5, 1.0], [0.5, 1.0])
    assert found == ([0.6, 0.9], [0.5, 1.0])
    assert _texts(figure) == [[], ["30", "4"]]


def test_an_accuracy_of_zero_is_inside_the_panel() -> None:
    low, high = calibration([CalibrationPoint(0.9, 0.0, 1)]).axes[0].get_ylim()
    assert low < 0 and high > 1


@pytest.mark.parametrize(
    "figure",
    [
        gold_and_proxy(STEPS[:1]),
        over_sqrt_kl(STEPS),
        kl([(20 * step, numbers) for step, numbers in STEPS]),
        entropy_and_length(STEPS),
        histograms(SCORES),
        calibration(POINTS),
    ],
    ids=["reward", "sqrt_kl", "kl", "text", "scores", "calibration"],
)
def test_everything_is_drawn_within_900_pixels(figure: Figure, tmp_path: Path) -> None:
    save_png(figure, tmp_path / "plot.png")
    width, height = struct.unpack(">II", (tmp_path / "plot.png").read_bytes()[16:24])  # the PNG's header
    assert width == 900
    drawn = figure.get_tightbbox()  # in inches, everything that is visible
    assert drawn.x0 >= 0 and drawn.y0 >= 0
    assert drawn.x1 * figure.dpi <= width and drawn.y1 * figure.dpi <= height


def test_steps_are_marked_by_whole_numbers() -> None:
    for steps in (STEPS, STEPS[:1]):
        figure = gold_and_proxy(steps)
        figure.draw_without_rendering()
        ticks = figure.axes[1].get_xticks()
        assert len(ticks) and all(tick == round(tick) for tick in ticks)
