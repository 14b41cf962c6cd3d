"""What is added to a score is judged on the completion alone, and is what the settings say."""

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.shaping import ShapingKnobs
from rlhf_core.records import Completion, StopReason


def completion(tokens: int, stop: StopReason, prompt_ids: tuple[int, ...] = (1,)) -> Completion:
    return Completion(
        id="p/0",
        prompt_id="p",
        prompt_text="p",
        prompt_ids=list(prompt_ids),
        response_ids=[7] * tokens,
        text="x",
        stop=stop,
    )


ENDED, CUT = StopReason.EOS, StopReason.LENGTH
SCORES = torch.tensor([5.0, -5.0, 0.5])
ROWS = [completion(2, ENDED), completion(6, CUT), completion(10, ENDED)]


def shaped(**knobs: object) -> list[float]:
    return ShapingKnobs.model_validate(knobs).shape(SCORES, ROWS).tolist()


def test_as_shipped_a_score_is_left_alone() -> None:
    assert shaped() == SCORES.tolist()


def test_every_knob_by_hand() -> None:
    assert shaped(score_clip=2.0) == [2.0, -2.0, 0.5]
    assert shaped(missing_eos_penalty=1.0) == [5.0, -6.0, 0.5]
    assert shaped(length_penalty=0.5) == [4.0, -8.0, -4.5]
    # 4 to 8 tokens cost nothing; 2 misses two of them, 10 has two too many.
    assert shaped(length_window=(4, 8), window_penalty=1.0) == [3.0, -5.0, -1.5]


def test_a_score_is_clipped_before_anything_is_subtracted() -> None:
    assert shaped(score_clip=1.0, missing_eos_penalty=3.0)[1] == -4.0


def test_an_end_token_in_the_prompt_spares_no_penalty() -> None:
    row = completion(3, CUT, prompt_ids=(0, 1, 2))
    knobs = ShapingKnobs(missing_eos_penalty=1.0)
    assert knobs.shape(torch.zeros(1), [row]).tolist() == [-1.0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length_window": (1, 5)}, "means nothing without the other"),
        ({"window_penalty": 1.0}, "means nothing without the other"),
        ({"length_window": (5, 1), "window_penalty": 1.0}, "the fewest tokens, then the most"),
        ({"score_clip": 0}, "greater than 0"),
        ({"missing_eos_penalty": -1}, "greater than or equal to 0"),
    ],
)
def test_knobs_that_cannot_be_meant_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ShapingKnobs.model_validate(wrong)
