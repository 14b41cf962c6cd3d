"""Monitors of the update: each is fired by a fault made by hand, and by none of the sequences beside it."""

import math

import pytest
import torch

from rlhf_core.algorithms.monitors.updates import (
    AdvantageExplosion,
    ApproxKL,
    ClipFraction,
    CriticDead,
    CriticDiverging,
    EntropyCollapse,
    NegativeKL,
    NonFinite,
    RisingKL,
)
from tests.rlhf_core.algorithms.monitors.steps import TEXTS, a_step, begins, play, series

# Distance from the reference


def test_kl_that_rises_above_its_limit_is_an_alarm_and_kl_that_levels_off_is_none() -> None:
    monitor = RisingKL(per_token=0.5, window=2)
    rising = [a_step(log_ratio=0.2 * step) for step in range(5)]  # 0, 0.2, 0.4, 0.6, 0.8
    assert begins(monitor, rising) == [3]
    level = [a_step(log_ratio=kl) for kl in (0.1, 0.3, 0.45, 0.45, 0.45)]
    assert begins(monitor, level) == []
    # It began this far off, as a later round does, and does not rise: no alarm.
    assert begins(monitor, [a_step(log_ratio=0.7)] * 5) == []


def test_kl_is_a_mean_over_tokens_and_padding_is_none() -> None:
    # "ab" has 2 tokens at 1 nat, "abcdef" 6 at 0.2: (2 * 1 + 6 * 0.2) / 8 = 0.4; over rows it would be 0.6.
    start, two = a_step(texts=["ab", "abcdef"]), a_step(texts=["ab", "abcdef"], log_ratio=[1.0, 0.2])
    assert begins(RisingKL(per_token=0.39), [start, two]) == [1]
    assert begins(RisingKL(per_token=0.41), [start, two]) == []


def test_negative_mean_kl_names_its_likely_causes() -> None:
    (alarm,) = play(NegativeKL(per_token=0.05), [a_step(log_ratio=-0.1)])
    assert alarm.sentence.startswith("mean KL to the reference in nats a token is -0.1, below -0.05. ")
    for cause in ("top-k", "temperature", "older weights", "padding", "another reference"):
        assert cause in alarm.sentence


def test_mean_kl_that_chance_takes_below_zero_is_no_alarm() -> None:
    assert begins(NegativeKL(per_token=0.05), [a_step(log_ratio=-0.04)]) == []
    # Rows of about -12 and +8 nats: their mean of about -1 has a standard error of 4, and is chance.
    apart = [-1.2, 0.8] * 4
    texts = ["ten tokens"] * 8
    steps = [a_step(texts=texts, log_ratio=[value + 0.1 for value in apart])]
    assert begins(NegativeKL(per_token=0.05), steps) == []
    # The same mean of -0.1 a token, and rows that agree on it.
    assert begins(NegativeKL(per_token=0.05), [a_step(texts=texts, log_ratio=[-0.11, -0.09] * 4)]) == [0]


# Size of the steps


def test_a_clip_fraction_above_its_share_is_an_alarm() -> None:
    assert begins(ClipFraction(share=0.35), series("policy/clipfrac", 0.05, 0.3, 0.36, 0.1)) == [2]


def test_an_approximate_kl_above_its_limit_is_an_alarm() -> None:
    assert begins(ApproxKL(per_token=0.2), series("policy/approxkl_max", 0.01, 0.19, 0.5)) == [2]


# The critic


def test_a_critic_that_stays_worse_than_a_constant_is_dead() -> None:
    monitor = CriticDead(window=4, gain=0.1)
    assert begins(monitor, series("value/explained_variance", -0.5, -0.6, -0.5, -0.6, -0.5)) == [3]


@pytest.mark.parametrize(
    "explained",
    [
        (-1.2, -0.9, -0.6, -0.3, -0.1),  # worse than a constant, and learning
        (-0.5, -0.5, 0.1, -0.5, -0.5),  # explained something once in each window
        (-0.5, -0.5, -0.5),  # too early to say
        (0.2, 0.1, 0.2, 0.1, 0.2),
    ],
)
def test_a_critic_that_learns_or_explains_something_is_not_dead(explained: tuple[float, ...]) -> None:
    assert begins(CriticDead(window=4, gain=0.1), series("value/explained_variance", *explained)) == []


def test_an_error_that_explodes_while_nothing_is_explained_is_a_diverging_critic() -> None:
    errors, explained = (1.0, 2.0, 1.0, 1.0, 9.0), (0.1, 0.1, 0.1, 0.1, -5.0)
    monitor = CriticDiverging(factor=8.0)  # the median of 1, 2, 1, 1 is 1
    assert begins(monitor, series("value/error", *errors, value_explained_variance=explained)) == [4]
    # Returns on a larger scale have a larger error; a critic that explains them does not diverge.
    followed = (*explained[:4], 0.5)
    assert begins(monitor, series("value/error", *errors, value_explained_variance=followed)) == []
    # Two earlier steps are no median.
    assert (
        begins(monitor, series("value/error", 1.0, 1.0, 9.0, value_explained_variance=(-1.0, -1.0, -1.0)))
        == []
    )


def spread(size: float) -> torch.Tensor:
    """Returns of +size and -size in turn, as wide as the responses."""
    width = max(len(text) for text in TEXTS)
    return size * torch.tensor([1.0, -1.0]).repeat(len(TEXTS) * width // 2 + 1)[: len(TEXTS) * width].view(
        -1, width
    )


def test_raw_advantages_far_beyond_earlier_ones_are_an_explosion() -> None:
    monitor = AdvantageExplosion(factor=5.0)
    assert begins(monitor, [a_step(returns=spread(size)) for size in (1, 1, 2, 1, 6, 1)]) == [4]
    assert begins(monitor, [a_step(returns=spread(size)) for size in (1, 1, 2, 1, 4, 1)]) == []


def test_one_token_that_has_most_of_the_advantage_is_an_explosion() -> None:
    white = torch.zeros(len(TEXTS), 11)
    white[2, 3] = -16.0
    assert begins(AdvantageExplosion(largest=15.0), [a_step(), a_step(advantages=white)]) == [1]
    masked = torch.zeros(len(TEXTS), 11)
    masked[0, 10] = -16.0  # "red thing" has 9 tokens: this one does not count
    assert begins(AdvantageExplosion(largest=15.0), [a_step(advantages=masked)]) == []


# Entropy, and numbers that are none


def test_entropy_that_falls_to_a_share_of_the_first_is_a_collapse() -> None:
    monitor = EntropyCollapse(steps=2, share=0.4)
    assert begins(monitor, series("objective/entropy", 3.0, 2.0, 1.1, 1.1, 1.0)) == [3]  # 1.1 / 3 = 0.37
    assert (
        begins(monitor, series("objective/entropy", 3.0, 2.0, 1.1, 1.3, 1.1, 1.3)) == []
    )  # never two in a row
    assert begins(monitor, series("objective/entropy", 1.1, 1.1, 1.1)) == []  # it began like this


def test_skipped_steps_and_metrics_that_are_not_finite_are_named() -> None:
    (alarm,) = play(NonFinite(), series("optim/policy_skipped", 0.0, 0.25))
    assert (alarm.step, alarm.sentence[:52]) == (1, "share of optimiser steps skipped is 0.25, above 0. O")
    (alarm,) = play(NonFinite(), series("value/loss", 1.0, math.nan, 1.0, objective_kl=[0, math.inf, 0]))
    assert alarm.sentence.startswith("number of metrics that are not finite is 2, above 0.")
    assert alarm.examples == ("objective/kl", "value/loss")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_other_monitor_speaks_of_numbers_that_are_none(value: float) -> None:
    names = (
        "policy/clipfrac",
        "policy/approxkl_max",
        "value/explained_variance",
        "objective/entropy",
        "value/error",
    )
    steps = [a_step(dict.fromkeys(names, value), log_ratio=value)] * 8
    for monitor in (RisingKL(), NegativeKL(), ClipFraction(), ApproxKL(), CriticDead(), EntropyCollapse()):
        assert play(monitor, steps) == []
