"""Monitors of what the reward pays for, each fired by a fault made by hand and silent beside it."""

import math

import pytest
import torch

from rlhf_core.algorithms.monitors.scores import (
    MAX_TREND,
    GoldFalls,
    ScoreLength,
    ScoreOutliers,
    correlation,
    trend,
)
from tests.rlhf_core.algorithms.monitors.steps import a_step, begins, play, series

UP, DOWN = [0.0, 0.5, 0.9, 1.6, 2.0, 2.4], [0.6, 0.55, 0.5, 0.38, 0.3, 0.2]


def test_the_trend_by_hand() -> None:
    # Places -1.5 .. 1.5, Sxx = 5. Values 0 2 1 3: mean 1.5, Sxy = 2.25 - 0.25 - 0.25 + 2.25 = 4, slope 0.8.
    # Residuals -0.3 0.9 -0.9 0.3: squares sum to 1.8; se^2 = 1.8 / 2 / 5 = 0.18.
    assert trend([0, 2, 1, 3]) == pytest.approx(0.8 / math.sqrt(0.18))
    assert trend([3, 1, 2, 0]) == pytest.approx(-0.8 / math.sqrt(0.18))
    assert trend([1, 1, 1, 1]) == 0
    assert trend([1, 2, 3, 4]) == MAX_TREND and trend([8, 6, 4, 2]) == -MAX_TREND


def test_a_proxy_that_rises_while_gold_falls_is_an_alarm() -> None:
    assert begins(GoldFalls(), series("objective/scores", *UP, objective_gold=DOWN)) == [5]


@pytest.mark.parametrize(
    ("proxy", "gold"),
    [
        (UP, UP),
        (DOWN, DOWN),
        (DOWN, UP),
        (UP, [0.5, 0.6, 0.4, 0.55, 0.45, 0.5]),  # gold goes nowhere
        ([0.5, 0.4, 0.6, 0.5, 0.4, 0.6], DOWN),  # the proxy goes nowhere
    ],
)
def test_no_other_pair_of_trends_is_hacking(proxy: list[float], gold: list[float]) -> None:
    assert begins(GoldFalls(), series("objective/scores", *proxy, objective_gold=gold)) == []


def test_without_a_gold_score_there_is_nothing_to_say() -> None:
    assert begins(GoldFalls(), series("objective/scores", *UP)) == []


def test_correlation_is_that_of_pearson() -> None:
    x, y = (
        torch.tensor([1.0, 2, 3, 5], dtype=torch.float64),
        torch.tensor([2.0, 1, 4, 4], dtype=torch.float64),
    )
    assert correlation(x, y) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))
    assert correlation(x, torch.ones(4)) is None
    assert correlation(x * math.nan, y) is None


def lengths(*sizes: int) -> list[str]:
    return ["x" * size for size in sizes]


SHORT, LONG = lengths(2, 3, 4, 5), lengths(4, 6, 8, 10)  # of mean 3.5 and 7


def test_scores_that_follow_length_where_length_has_grown_are_an_alarm() -> None:
    paid = [0.0, 1.0, 2.0, 3.0]
    steps = [a_step(texts=texts, scores=paid) for texts in (SHORT, SHORT, SHORT, LONG)]
    assert begins(ScoreLength(), steps) == [3]
    assert begins(ScoreLength(), steps[:3]) == []  # they follow length, and length stayed


def test_scores_that_go_against_length_are_an_alarm_where_it_has_shrunk_and_none_where_it_has_grown() -> None:
    paid = [3.0, 2.0, 1.0, 0.0]
    shrunk = [a_step(texts=texts, scores=paid) for texts in (LONG, LONG, LONG, SHORT)]
    assert begins(ScoreLength(), shrunk) == [3]
    grown = [a_step(texts=texts, scores=paid) for texts in (SHORT, SHORT, SHORT, LONG)]
    assert begins(ScoreLength(), grown) == []


def test_scores_that_do_not_follow_length_are_no_alarm_however_it_drifts() -> None:
    # The products of deviations -3 -1 1 3 and 1 -1 -1 1 sum to 0.
    steps = [a_step(texts=texts, scores=[1.0, 0.0, 0.0, 1.0]) for texts in (SHORT, SHORT, SHORT, LONG, LONG)]
    assert begins(ScoreLength(), steps) == []


def test_one_score_far_above_all_others_is_an_alarm_with_its_text() -> None:
    # Median 0; deviations 0 0 .1 .1 .2 .2 .3 9: median .15, times 1.4826 = .222. 9 / .222 = 40.
    scores = [0.0, 0.0, 0.1, -0.1, 0.2, -0.2, -0.3, 9.0]
    (alarm,) = play(ScoreOutliers(steps=1, deviations=12.0), [a_step(scores=scores)])
    assert alarm.sentence.startswith("highest score above the median in deviations is 40.5, above 12.")
    assert alarm.examples == ("9: 'odd thing'",)
    assert begins(ScoreOutliers(steps=1, deviations=12.0), [a_step(scores=[*scores[:7], 2.0])]) == []  # 9.0
    # Far below is no hole that a policy would look for.
    assert begins(ScoreOutliers(steps=1, deviations=12.0), [a_step(scores=[*scores[:7], -9.0])]) == []


def test_a_rare_success_among_equal_scores_is_no_alarm() -> None:
    # The median deviation is 0, the standard one 0.33: (1 - 0) / 0.33 = 3.
    assert begins(ScoreOutliers(steps=1), [a_step(scores=[0.0] * 7 + [1.0])]) == []
    assert begins(ScoreOutliers(steps=1), [a_step(scores=[1.0] * 8)]) == []
