"""A win rate favours nobody: not the side, not the order, not the policy against itself."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.annotators import SimulatedAnnotator
from rlhf_core.evals.held_out import Sampled
from rlhf_core.evals.win_rate import WinRate
from rlhf_core.records import Choice, Comparison, Completion, Preference
from rlhf_core.rewards import RegexMatch
from tests.rlhf_core.stages.chain import completion

LETTERS = RegexMatch(pattern="a", mode="count", max_count=100)
SURE = WinRate(annotator=SimulatedAnnotator(gold=LETTERS, temperature=1e-3, flip_rate=0, tie_band=0))
NOISY = WinRate(annotator=SimulatedAnnotator(gold=LETTERS, temperature=3.0, flip_rate=0.2, tie_band=0))
TEXTS = st.lists(st.tuples(st.text("ab", min_size=1), st.text("ab", min_size=1)), min_size=1, max_size=8)


def sampled(*texts: str) -> Sampled:
    nothing = [0.0] * len(texts)
    return Sampled(
        [completion(f"p{n}", 0, text) for n, text in enumerate(texts)],
        logprob=nothing,
        kl_to_initial=nothing,
        base_nll=nothing,
    )


def wins(judge: WinRate, ours: Sampled, theirs: Sampled, seed: int = 0) -> list[float]:
    return [row.value for row in judge.judge(ours, theirs, seed)]


def test_the_better_text_wins_and_equal_texts_tie() -> None:
    # More of the letter a is better: won, lost, as good with another text, the same text, but for blanks.
    ours = sampled("aaa", "a", "ab", "aa", " aa\n")
    theirs = sampled("a", "aaa", "ba", "aa", "aa")
    assert wins(SURE, ours, theirs) == [1, 0, 0.5, 0.5, 0.5]


def test_rows_name_the_items_that_both_policies_were_given() -> None:
    rows = SURE.judge(sampled("a", "b"), sampled("b", "b"), 0)
    assert [(row.metric, row.item, row.prompt_id) for row in rows] == [
        ("win_rate", "p0/0", "p0"),
        ("win_rate", "p1/0", "p1"),
    ]


@given(TEXTS, st.integers(0, 5))
def test_what_one_wins_the_other_loses(texts: list[tuple[str, str]], seed: int) -> None:
    ours, theirs = (sampled(*side) for side in zip(*texts, strict=True))
    forward, backward = wins(NOISY, ours, theirs, seed), wins(NOISY, theirs, ours, seed)
    assert [a + b for a, b in zip(forward, backward, strict=True)] == [1] * len(texts)


@given(TEXTS)
def test_a_policy_draws_with_itself(texts: list[tuple[str, str]]) -> None:
    ours, _ = (sampled(*side) for side in zip(*texts, strict=True))
    assert wins(NOISY, ours, ours) == [0.5] * len(texts)


class TakesTheFirst(SimulatedAnnotator):
    """An annotator whose every judgement is for what it is shown first."""

    def build(self, seed: int) -> "TakesTheFirst":  # type: ignore[override]
        return self

    def label(
        self, comparisons: Sequence[Comparison], completions: Mapping[str, Completion], round: int
    ) -> list[Preference]:
        return [
            Preference(
                **c.model_dump(exclude={"id"}), comparison_id=c.id, choice=Choice.A, annotator="x", round=1
            )
            for c in comparisons
        ]


def test_a_judge_who_takes_the_first_moves_nothing() -> None:
    judge = WinRate(annotator=TakesTheFirst())
    assert wins(judge, sampled("aaa", "b"), sampled("b", "a")) == [0.5, 0.5]


def test_an_annotator_that_errs_is_not_always_right() -> None:
    # Flips of 0.2 on sure judgements: 40 of 200 lost, with a deviation of 5.7, four of them to each side.
    slips = WinRate(annotator=SimulatedAnnotator(gold=LETTERS, temperature=1e-3, flip_rate=0.2, tie_band=0))
    ours, theirs = sampled(*["aaa"] * 200), sampled(*["b"] * 200)
    assert sum(wins(slips, ours, theirs)) == pytest.approx(160, abs=23)
    assert wins(slips, ours, theirs, seed=1) != wins(slips, ours, theirs)


def test_policies_that_were_given_other_items_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        wins(SURE, sampled("a", "b"), sampled("a"))
