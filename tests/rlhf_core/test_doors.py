"""What every reward, annotator and evaluation behind its door promises; a new member is tested at once."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.annotators import AnnotatorSettings, SimulatedAnnotator
from rlhf_core.evals import Evals
from rlhf_core.evals.held_out import HeldOut, Sampled, paired_differences
from rlhf_core.evals.win_rate import WinRate
from rlhf_core.records import Completion, StopReason, compare
from rlhf_core.rewards import ExactMatch, LengthWindow, RegexMatch, RuleReward, Sentiment
from tests.doors import members

# What a member cannot do without; one that is missing here fails the first test.
REWARDS: dict[type, dict[str, Any]] = {
    ExactMatch: {"answer": "good"},
    RegexMatch: {"pattern": "o", "mode": "count"},
    LengthWindow: {"min_tokens": 2, "max_tokens": 5},
    Sentiment: {},
}
ANNOTATORS: dict[type, dict[str, Any]] = {SimulatedAnnotator: {"temperature": 0.5, "flip_rate": 0.2}}
EVALS: dict[type, dict[str, Any]] = {HeldOut: {}, WinRate: {}}

WORDS = st.lists(st.sampled_from(["good", "bad", "so", "o", "awful", "lovely", "9"]), min_size=1, max_size=6)
TEXTS = st.lists(WORDS.map(" ".join), min_size=2, max_size=8)


def completions(texts: Sequence[str], prompt_of: Sequence[str] = ()) -> list[Completion]:
    return [
        Completion(
            id=f"{prompt_of[n] if prompt_of else n}/{n}",
            prompt_id=prompt_of[n] if prompt_of else str(n),
            prompt_text="It was",
            prompt_ids=[1],
            response_ids=[ord(letter) for letter in text],
            text=text,
            stop=StopReason.LENGTH,
        )
        for n, text in enumerate(texts)
    ]


def test_every_member_has_an_example_here() -> None:
    assert set(REWARDS) == set(members(RuleReward))
    assert set(ANNOTATORS) == set(members(AnnotatorSettings))
    assert set(EVALS) == {type(value) for value in dict(Evals()).values()}


@pytest.mark.parametrize("member", REWARDS)
@settings(max_examples=25)
@given(texts=TEXTS, order=st.randoms(use_true_random=False))
def test_a_rewards_score_of_one_completion_does_not_depend_on_the_others(
    member: type, texts: list[str], order: Any
) -> None:
    source = member(**REWARDS[member]).build()
    items = completions(texts)
    scores = source.score(items).total
    assert scores.shape == (len(items),) and scores.dtype == torch.float32 and scores.isfinite().all()
    places = list(range(len(items)))
    order.shuffle(places)
    assert torch.equal(source.score([items[place] for place in places]).total, scores[places])
    assert torch.equal(torch.cat([source.score([item]).total for item in items]), scores)


@pytest.mark.parametrize("member", ANNOTATORS)
@settings(max_examples=25)
@given(texts=TEXTS, seed=st.integers(0, 99))
def test_an_annotators_label_does_not_depend_on_the_order_shown_nor_on_the_other_pairs(
    member: type, texts: list[str], seed: int
) -> None:
    annotator = member(**ANNOTATORS[member]).build(seed)
    items = completions(texts, ["p"] * len(texts))
    by_id = {item.id: item for item in items}
    pairs = [compare("p", a.id, b.id) for a, b in itertools.pairwise(items)]
    labels = annotator.label(pairs, by_id, 3)
    assert [label.comparison_id for label in labels] == [pair.id for pair in pairs]
    assert {label.round for label in labels} == {3}
    swapped = annotator.label([pair.swap() for pair in pairs], by_id, 3)
    assert [label.swap() for label in swapped] == labels
    assert [annotator.label([pair], by_id, 3)[0] for pair in pairs] == labels


@pytest.mark.parametrize("member", EVALS)
def test_an_evaluation_finds_no_difference_between_a_policy_and_itself(member: type) -> None:
    items = completions(["so good", "bad", "o", "lovely and awful"])
    numbers = [float(n) for n in range(len(items))]
    sampled = Sampled(items, logprob=numbers, kl_to_initial=numbers, base_nll=numbers)
    spec = member(**EVALS[member])
    if isinstance(spec, WinRate):
        assert [row.value for row in spec.judge(sampled, sampled, seed=1)] == [0.5] * len(items)
    else:
        rows = spec.measure(sampled)
        differences = paired_differences(rows, spec.measure(sampled), seed=1)
        assert {row.metric for row in rows} == set(differences)
        assert {(d.low, d.value, d.high) for d in differences.values()} == {(0.0, 0.0, 0.0)}
