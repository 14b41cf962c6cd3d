import pytest
from pydantic import ValidationError

from rlhf_core.records import Completion, StopReason
from rlhf_core.rewards.verifier import ExactMatch, LengthWindow, RegexMatch


def completion(text: str, length: int = 1) -> Completion:
    return Completion(
        id="p/0",
        prompt_id="p",
        prompt_text="yes 42",
        prompt_ids=[1],
        response_ids=[2] * length,
        text=text,
        stop=StopReason.EOS,
    )


def scores(reward: ExactMatch | RegexMatch, *texts: str) -> list[float]:
    total: list[float] = reward.build().score([completion(text) for text in texts]).total.tolist()
    return total


def test_exact_match_needs_the_whole_answer() -> None:
    assert scores(ExactMatch(answer="42"), "42", " 42\n", "42.", "4 2", "", "142") == [1, 1, 0, 0, 0, 0]


def test_exact_match_strips_the_answer_as_it_strips_the_completion() -> None:
    assert scores(ExactMatch(answer=" 42 "), "42") == [1]
    assert scores(ExactMatch(answer=" 42 ", strip=False), "42", " 42 ", " 42") == [0, 1, 0]
    assert scores(ExactMatch(answer=" ", strip=False), " ", "") == [1, 0]


def test_exact_match_ignores_case_only_when_told() -> None:
    assert scores(ExactMatch(answer="Straße"), "straße") == [0]
    assert scores(ExactMatch(answer="Straße", ignore_case=True), "straße", "STRASSE", "Strass") == [1, 1, 0]


def test_exact_match_refuses_an_answer_that_a_blank_completion_meets() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        ExactMatch(answer="", strip=False)
    with pytest.raises(ValidationError, match="empty once stripped"):
        ExactMatch(answer="  \n")


def test_regex_search_looks_anywhere_and_fullmatch_at_the_whole_text() -> None:
    texts = ("yes", "oh yes!", "no", "")
    assert scores(RegexMatch(pattern="yes"), *texts) == [1, 1, 0, 0]
    assert scores(RegexMatch(pattern="yes", mode="fullmatch"), *texts) == [1, 0, 0, 0]
    assert scores(RegexMatch(pattern="(?i)YES", mode="fullmatch"), *texts) == [1, 0, 0, 0]


def test_regex_count_counts_matches_up_to_the_cap() -> None:
    reward = RegexMatch(pattern=r"\bha\b", mode="count", max_count=3)
    assert scores(reward, "", "ha", "ha ha", "ha ha ha", "ha ha ha ha", "haha") == [0, 1, 2, 3, 3, 0]


def test_regex_count_leaves_out_empty_matches() -> None:
    # "b*" matches the empty string between and after the other letters; "bb" and "b" are what counts.
    assert scores(RegexMatch(pattern="b*", mode="count"), "abbab", "aaa") == [2, 0]


def test_a_pattern_that_does_not_compile_is_refused_with_its_position() -> None:
    with pytest.raises(ValidationError, match=r"'ab\(c' does not compile: missing \).* at position 2\."):
        RegexMatch(pattern="ab(c")
    with pytest.raises(ValidationError, match="does not compile: the repetition number is too large"):
        RegexMatch(pattern="a{99999999999}")


def test_length_window_is_one_inside_and_falls_over_the_margin() -> None:
    # Window 4 to 6, margin 4: 3 is one token outside, 1 - 1/4; 2 gives 1 - 2/4; 9 gives 1 - 3/4; 10 gives 0.
    items = [completion("x", length) for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99)]
    total = LengthWindow(min_tokens=4, max_tokens=6, soft_margin=4).build().score(items).total
    assert total.tolist() == [0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_length_window_without_a_margin_is_hard() -> None:
    items = [completion("x", length) for length in (1, 2, 3, 4)]
    assert LengthWindow(min_tokens=2, max_tokens=3).build().score(items).total.tolist() == [0, 1, 1, 0]


def test_length_window_that_no_completion_meets_is_refused() -> None:
    assert LengthWindow(min_tokens=3, max_tokens=3).max_tokens == 3
    with pytest.raises(ValidationError, match="min_tokens 4 is above max_tokens 3"):
        LengthWindow(min_tokens=4, max_tokens=3)
