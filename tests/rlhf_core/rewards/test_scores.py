import pytest
import torch

from rlhf_core.records import Completion, StopReason
from rlhf_core.rewards.scores import PerCompletion, Scores


def completion(text: str) -> Completion:
    return Completion(
        id=f"p/{text}",
        prompt_id="p",
        prompt_text="p",
        prompt_ids=[1],
        response_ids=[2],
        text=text,
        stop=StopReason.EOS,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_refused_by_row(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^scores are not finite in rows \[1, 3\] of 4"):
        Scores(torch.tensor([0.0, bad, 1.0, bad]))
    per_token = torch.zeros(2, 3)
    per_token[1, 2] = bad
    with pytest.raises(ValueError, match=r"per-token scores are not finite in rows \[1\] of 2"):
        Scores(torch.zeros(2), per_token)


def test_scores_of_a_wrong_shape_or_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 1\]"):
        Scores(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"scores are torch\.bfloat16"):
        Scores(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"shape \[3, 4\] beside 2 completions: \[2, T\]"):
        Scores(torch.zeros(2), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"shape \[2\] beside 2 completions"):
        Scores(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"per-token scores are torch\.float64"):
        Scores(torch.zeros(2), torch.zeros(2, 4, dtype=torch.float64))


def test_each_completion_gets_its_own_number_whatever_stands_beside_it() -> None:
    source = PerCompletion(lambda item: float(len(item.text)))
    items = [completion("aaa"), completion("b"), completion("cc")]
    assert source.score(items).total.tolist() == [3, 1, 2]
    assert source.score(items[::-1]).total.tolist() == [2, 1, 3]
    assert [source.score([item]).total.item() for item in items] == [3, 1, 2]
    assert source.score([]).total.shape == (0,)


def test_a_rule_that_gives_no_number_stops_the_batch() -> None:
    with pytest.raises(ValueError, match=r"rows \[0\] of 1"):
        PerCompletion(lambda item: float("nan")).score([completion("x")])
