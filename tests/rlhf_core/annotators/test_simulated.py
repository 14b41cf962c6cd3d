"""A simulated person errs as often as the settings say, whatever is shown first and beside."""

import math
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from rlhf_core.annotators.simulated import Simulated, SimulatedAnnotator
from rlhf_core.records import Choice, Comparison, Completion, Preference, StopReason, compare
from rlhf_core.rewards import RegexMatch

COUNT = RegexMatch(pattern="x", mode="count", max_count=100)  # gold: the number of x in the text
NUM_PAIRS = 4000


def completion(name: str, text: str) -> Completion:
    return Completion(
        id=name, prompt_id=name.split("/")[0], prompt_text="?", prompt_ids=[1], response_ids=[1], text=text,
        stop=StopReason.LENGTH,
    )  # fmt: skip


def pairs(num_pairs: int, gold_a: int, gold_b: int) -> tuple[list[Comparison], dict[str, Completion]]:
    """Comparisons of a text with `gold_a` x, shown first, against one with `gold_b`; names tell nothing."""
    completions = [
        completion(f"p{i}/{k}", "x" * (gold_a if k == i % 2 else gold_b))
        for i in range(num_pairs)
        for k in range(2)
    ]
    shown = [compare(f"p{i}", f"p{i}/{i % 2}", f"p{i}/{1 - i % 2}") for i in range(num_pairs)]
    return shown, {c.id: c for c in completions}


def annotator(seed: int = 0, **how: float) -> Simulated:
    settings = {"temperature": 1.0, "flip_rate": 0.0, "tie_band": 0.0} | how
    return SimulatedAnnotator(gold=COUNT, **settings).build(seed)


def share(labels: Sequence[Preference], choice: Choice) -> float:
    return sum(label.choice is choice for label in labels) / len(labels)


@pytest.mark.parametrize(
    ("how", "golds", "wanted"),
    [
        ({"temperature": 1.0}, (2, 1), 1 / (1 + math.exp(-1))),
        ({"temperature": 0.5}, (2, 1), 1 / (1 + math.exp(-2))),
        ({"temperature": 2.0}, (1, 4), 1 / (1 + math.exp(1.5))),
        # A slip alone: what is certain is turned round one time in five.
        ({"temperature": 1e-6, "flip_rate": 0.2}, (2, 1), 0.8),
        # Both: p = sigmoid(1) = 0.7311, and 0.9 p + 0.1 (1 - p) = 0.6849.
        ({"temperature": 1.0, "flip_rate": 0.1}, (2, 1), 0.684847),
    ],
)
def test_the_first_is_chosen_as_often_as_bradley_terry_and_the_slips_say(
    how: dict[str, float], golds: tuple[int, int], wanted: float
) -> None:
    comparisons, completions = pairs(NUM_PAIRS, *golds)
    labels = annotator(**how).label(comparisons, completions, round=1)
    standard_error = (wanted * (1 - wanted) / NUM_PAIRS) ** 0.5
    assert share(labels, Choice.A) == pytest.approx(wanted, abs=3 * standard_error)
    assert share(labels, Choice.TIE) == 0


def test_the_order_shown_changes_no_judgement() -> None:
    comparisons, completions = pairs(300, 2, 1)
    who = annotator(temperature=2.0, flip_rate=0.3)
    swapped = who.label([c.swap() for c in comparisons], completions, round=1)
    assert swapped == [label.swap() for label in who.label(comparisons, completions, round=1)]


def test_judgements_are_functions_of_the_seed() -> None:
    comparisons, completions = pairs(300, 2, 1)
    first, again, other = (
        annotator(seed, flip_rate=0.1).label(comparisons, completions, 1) for seed in (0, 0, 1)
    )
    assert first == again
    # Two draws of sigmoid(1) with slips of 0.1 differ with probability 2 p (1 - p) = 0.43.
    assert 0.3 < sum(a != b for a, b in zip(first, other, strict=True)) / 300 < 0.56


def test_a_judgement_does_not_depend_on_the_other_comparisons_of_the_call() -> None:
    comparisons, completions = pairs(200, 2, 1)
    who = annotator(flip_rate=0.1)
    together = who.label(comparisons, completions, 1)
    assert [who.label([c], completions, 1)[0] for c in comparisons] == together
    assert who.label(comparisons[::-1], completions, 1) == together[::-1]


def test_pairs_are_judged_independently_of_each_other() -> None:
    # Equal golds with no tie band to speak of would be ties, so a small difference: p = sigmoid(0.1).
    comparisons, completions = pairs(NUM_PAIRS, 2, 1)
    labels = annotator(temperature=10.0).label(comparisons, completions, 1)
    p = 1 / (1 + math.exp(-0.1))
    both = sum(a.choice is b.choice is Choice.A for a, b in zip(labels[::2], labels[1::2], strict=True)) / (
        NUM_PAIRS / 2
    )
    assert both == pytest.approx(p * p, abs=3 * (p * p * (1 - p * p) / (NUM_PAIRS / 2)) ** 0.5)


@pytest.mark.parametrize(("band", "tie"), [(0.0, False), (0.99, False), (1.0, True), (5.0, True)])
def test_differences_up_to_the_band_are_ties_and_slips_do_not_touch_them(band: float, tie: bool) -> None:
    comparisons, completions = pairs(200, 2, 1)
    labels = annotator(tie_band=band, flip_rate=0.4).label(comparisons, completions, 1)
    assert share(labels, Choice.TIE) == float(tie)


def test_equal_golds_are_a_tie_even_without_a_band() -> None:
    comparisons, completions = pairs(20, 3, 3)
    assert share(annotator().label(comparisons, completions, 1), Choice.TIE) == 1


def test_a_label_says_what_was_judged_by_whom_and_when() -> None:
    comparisons, completions = pairs(3, 2, 1)
    labels = annotator().label(comparisons, completions, round=4)
    for label, shown in zip(labels, comparisons, strict=True):
        assert (label.comparison_id, label.prompt_id) == (shown.id, shown.prompt_id)
        assert (label.completion_a, label.completion_b) == (shown.completion_a, shown.completion_b)
        assert (label.annotator, label.round) == ("simulated", 4)


def test_huge_differences_are_certain_and_nothing_to_judge_is_no_label() -> None:
    comparisons, completions = pairs(50, 100, 0)
    who = annotator(temperature=1e-9)
    assert share(who.label(comparisons, completions, 1), Choice.A) == 1
    assert who.label([], completions, 1) == []


def test_by_default_the_gladder_text_is_better() -> None:
    completions = {
        c.id: c
        for i in range(100)
        for c in (
            completion(f"p{i}/0", "What a wonderful, happy day!"),
            completion(f"p{i}/1", "A sad, awful loss."),
        )
    }
    shown = [compare(f"p{i}", f"p{i}/0", f"p{i}/1") for i in range(100)]
    assert share(SimulatedAnnotator().build(0).label(shown, completions, 1), Choice.A) > 0.85


@pytest.mark.parametrize("how", [{"flip_rate": 0.5}, {"temperature": 0}, {"tie_band": -0.1}])
def test_settings_that_teach_nothing_are_refused(how: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SimulatedAnnotator.model_validate(how)
