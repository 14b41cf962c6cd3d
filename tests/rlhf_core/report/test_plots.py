import math
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rlhf_core.report.plots import calibration, gold_and_proxy, kl, save
from rlhf_core.report.view import CalibrationPoint, Steps

STEPS: Steps = [
    (
        step,
        {
            "objective/scores": 0.1 * step,
            "objective/gold": 0.2 * step,
            "objective/kl": 0.01 * step,
            "objective/kl_sequence": 0.4 * step,
            "objective/kl_to_start": 0.4 * step + 0.01,
        },
    )
    for step in range(4)
]
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
    [gold_and_proxy(STEPS[:1]), kl([(20 * step, numbers) for step, numbers in STEPS]), calibration(POINTS)],
    ids=["reward", "kl", "calibration"],
)
def test_everything_is_drawn_within_900_pixels(figure: Figure, tmp_path: Path) -> None:
    save(figure, tmp_path / "plot.png")
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


def test_one_figure_gives_one_file_to_the_byte(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save(kl(STEPS), tmp_path / name)
    first = (tmp_path / "first").read_bytes()
    assert first == (tmp_path / "second").read_bytes()
    assert b"Software" not in first
