import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evals.text_statistics import distinct_n, repetition

WORDS = st.lists(st.sampled_from(["sun", "rain", "wind", ","]), max_size=12).map(" ".join)


def test_distinct_n_by_hand() -> None:
    # Unigrams a b a b c: 3 different of 5. Bigrams ab ba ab bc: 3 of 4. Trigrams aba bab abc: 3 of 3.
    assert distinct_n(["a b a b c"], 1) == pytest.approx(3 / 5)
    assert distinct_n(["a b a b c"], 2) == pytest.approx(3 / 4)
    assert distinct_n(["a b a b c"], 3) == 1


def test_distinct_n_pools_the_texts_and_crosses_no_border() -> None:
    # ab, ab, ba: 2 different of 3; "b b" between the first two texts would have been a third.
    assert distinct_n(["a b", "a b", "b a"], 2) == pytest.approx(2 / 3)
    # The mean over texts would be 1: each text has a single bigram.
    assert distinct_n(["a b"] * 10, 2) == pytest.approx(1 / 10)


def test_tokens_are_words_and_punctuation_marks() -> None:
    # no , no , No: "no", the comma and "No" are the 3 different of 5.
    assert distinct_n(["no, no, No"], 1) == pytest.approx(3 / 5)
    assert distinct_n(["a\n b"], 2) == distinct_n(["a b"], 2) == 1


def test_nothing_to_count_gives_zero() -> None:
    assert distinct_n([], 2) == distinct_n(["", "one"], 2) == 0
    assert repetition("", 1) == repetition("two words") == 0


def test_repetition_by_hand() -> None:
    # Trigrams of "so good so good so": sgs gsg sgs; one of three was there before.
    assert repetition("so good so good so") == pytest.approx(1 / 3)
    assert repetition("ha ha ha ha", 1) == pytest.approx(3 / 4)
    assert repetition("each word here is new") == 0


@given(st.lists(WORDS, max_size=5), st.integers(1, 4))
def test_distinct_n_is_a_share_and_does_not_see_the_order_of_texts(texts: list[str], n: int) -> None:
    assert 0 <= distinct_n(texts, n) <= 1
    assert distinct_n(texts[::-1], n) == distinct_n(texts, n)


@given(WORDS, st.integers(1, 4))
def test_saying_all_again_only_adds_repetition(text: str, n: int) -> None:
    assert 0 <= repetition(text, n) <= repetition(f"{text} {text}", n) + 1e-12
    assert distinct_n([text, text], n) == pytest.approx(distinct_n([text], n) / 2)


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_one_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"length {n}"):
        distinct_n(["a b"], n)
