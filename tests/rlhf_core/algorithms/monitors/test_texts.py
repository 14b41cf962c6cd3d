"""Monitors of text: sameness, length, cut ends and phrases, each fired by hand and silent beside it."""

import pytest

from rlhf_core.algorithms.monitors.texts import LengthDrift, ModeCollapse, Phrases, Truncation
from tests.rlhf_core.algorithms.monitors.steps import TEXTS, a_step, begins, play, series


@pytest.mark.parametrize("n", [1, 2, 3])
def test_distinct_n_that_falls_to_half_of_the_first_is_a_collapse(n: int) -> None:
    monitor, name = ModeCollapse(steps=2, distinct_share=0.5), f"rollout/distinct_{n}"
    assert begins(monitor, series(name, 0.8, 0.5, 0.39, 0.38)) == [3]
    assert begins(monitor, series(name, 0.3, 0.3, 0.2, 0.16)) == []  # it began low


@pytest.mark.parametrize("name", ["self_bleu", "duplicates", "repetition"])
def test_sameness_that_rises_by_more_than_it_may_is_a_collapse(name: str) -> None:
    monitor = ModeCollapse(steps=1, self_bleu_rise=0.3, duplicates_rise=0.3, repetition_rise=0.3)
    assert begins(monitor, series(f"rollout/{name}", 0.1, 0.3, 0.5)) == [2]
    assert begins(monitor, series(f"rollout/{name}", 0.5, 0.6, 0.7, 0.75)) == []  # short answers repeat


def test_the_sentences_said_most_often_are_the_examples() -> None:
    same = ["I am happy."] * 5 + ["So am I."] * 2 + ["No."]
    steps = [a_step({"rollout/duplicates": 0.0}), a_step({"rollout/duplicates": 5 / 8}, texts=same)]
    (alarm,) = play(ModeCollapse(steps=1), steps)
    assert alarm.examples == ("5 of 8: 'I am happy.'", "2 of 8: 'So am I.'")


def test_length_that_drifts_is_an_alarm_either_way() -> None:
    monitor, name = LengthDrift(steps=2, longer=1.75, shorter=0.5), "rollout/response_length"
    assert begins(monitor, series(name, 20, 30, 36, 36)) == [3]
    assert begins(monitor, series(name, 20, 12, 9, 9)) == [3]
    assert begins(monitor, series(name, 20, 34, 11, 34, 11)) == []
    (alarm,) = play(monitor, series(name, 20, 9, 9))
    assert "shrunk" in alarm.sentence and "grown" not in alarm.sentence


def test_a_rising_share_of_cut_completions_is_an_alarm_and_text_that_is_meant_to_be_cut_is_none() -> None:
    assert begins(Truncation(steps=1, rise=0.3), series("rollout/stop.length", 0.1, 0.3, 0.5)) == [2]
    assert begins(Truncation(), series("rollout/stop.length", 1.0, 1.0, 1.0)) == []
    assert begins(Truncation(steps=1, share=0.9), series("rollout/stop.length", 0.95)) == [0]


def test_a_phrase_from_nowhere_is_listed_with_its_shares_and_an_example() -> None:
    glad = [f"{text} so very happy" for text in TEXTS[:6]] + list(TEXTS[6:])
    monitor = Phrases(steps=1, growth=5.0, share=0.5, min_count=2)
    (alarm,) = play(monitor, [a_step(texts=TEXTS), a_step(texts=TEXTS), a_step(texts=glad)])
    # (6 + 1) / 9 against (0 + 1) / 9: 7 times. "thing" is in all texts at both times: once.
    assert alarm.sentence.startswith("largest growth of a phrase is 7, above 5.")
    # "thing so very" and "so very happy" are in as many texts as their parts, which are not listed.
    assert alarm.examples == (
        "'so very happy': in 0% of completions at first, in 75% now, such as 'red thing so very happy'",
        "'thing so very': in 0% of completions at first, in 75% now, such as 'red thing so very happy'",
    )


def test_phrases_that_were_common_at_first_or_are_rare_now_are_no_alarm() -> None:
    monitor = Phrases(steps=1, growth=5.0, share=0.5, min_count=2)
    assert begins(monitor, [a_step(texts=["so happy"] * 8), a_step(texts=["so happy"] * 8)]) == []
    some = ["so happy"] * 3 + list(TEXTS[3:])  # 3 of 8 are less than half
    eager = monitor.model_copy(update={"growth": 3.5})  # theirs is (3 + 1) / 9 over 1 / 9
    assert begins(eager, [a_step(texts=TEXTS), a_step(texts=some)]) == []
    assert begins(eager.model_copy(update={"share": 0.3}), [a_step(texts=TEXTS), a_step(texts=some)]) == [1]
    assert (
        begins(Phrases(steps=1, growth=5.0, share=0.1, min_count=9), [a_step(), a_step(texts=["x"] * 8)])
        == []
    )
