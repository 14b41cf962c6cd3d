import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.text_statistics import (
    Exploded,
    distinct,
    distinct_n,
    duplicates,
    exploded,
    phrase_counts,
    repeated,
    repetition,
    self_bleu,
)

IDS = st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6)
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


def test_rows_of_token_ids_count_as_rows_of_words_do() -> None:
    assert distinct([[1, 2, 1, 2, 3]], 2) == distinct_n(["a b a b c"], 2) == pytest.approx(3 / 4)
    assert repeated([1, 2, 1, 2, 1, 2], 2) == repetition("a b a b a b", 2) == pytest.approx(3 / 5)


def test_duplicates_by_hand() -> None:
    # Three of five rows say what an earlier row says.
    assert duplicates([[1, 2], [1, 2], [1], [1, 2], [1]]) == pytest.approx(3 / 5)
    assert duplicates([[1], [2]]) == duplicates([]) == 0
    assert duplicates([[], []]) == 1 / 2


def test_self_bleu_by_hand() -> None:
    # Row 1, a b c d, against a b x y: unigrams 2/4, bigrams 1/3, equally long. And the same the other way.
    rows = ["abcd", "abxy"]
    assert self_bleu(rows, max_n=2) == pytest.approx(math.sqrt(1 / 2 * 1 / 3))
    assert self_bleu(rows, max_n=3) == 0  # no trigram in common
    # a a a against a b a: a counts twice there, so 2/3; of a b a against a a a: a twice, b never, 2/3.
    assert self_bleu(["aaa", "aba"], max_n=1) == pytest.approx(2 / 3)
    # "ab" is in "abcd" whole and 2 tokens short: exp(1 - 4 / 2). "abcd" has half of its unigrams in "ab".
    assert self_bleu(["ab", "abcd"], max_n=1) == pytest.approx((math.exp(-1) + 1 / 2) / 2)


def test_rows_that_are_all_the_same_have_self_bleu_1_and_rows_without_a_common_token_0() -> None:
    assert self_bleu(["abcdef"] * 3) == pytest.approx(1)
    assert self_bleu(["a", "a"]) == pytest.approx(1)  # shorter than the longest n-gram
    assert self_bleu(["abc", "def"]) == self_bleu(["abc"]) == self_bleu([]) == self_bleu(["", ""]) == 0


def bleu_by_definition(row: list[int], others: list[list[int]], max_n: int) -> float:
    """Papineni et al. (2002), section 2, reference by reference."""
    shares = []
    for n in range(1, min(max_n, len(row)) + 1):
        own = Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
        theirs = [Counter(tuple(o[i : i + n]) for i in range(len(o) - n + 1)) for o in others]
        shares.append(sum(min(c, max(t[g] for t in theirs)) for g, c in own.items()) / sum(own.values()))
    if not shares or min(shares) == 0:
        return 0.0
    nearest = min((abs(len(o) - len(row)), len(o)) for o in others)[1]
    brevity = 1.0 if len(row) >= nearest else math.exp(1 - nearest / len(row))
    return brevity * math.prod(shares) ** (1 / len(shares))


@given(IDS, st.integers(1, 4))
def test_self_bleu_is_the_mean_bleu_by_definition(rows: list[list[int]], max_n: int) -> None:
    each = [
        bleu_by_definition(row, rows[:i] + rows[i + 1 :], max_n)
        for i, row in enumerate(rows)
        if len(rows) > 1
    ]
    assert self_bleu(rows, max_n) == pytest.approx(sum(each) / max(1, len(each)))


def test_a_phrase_counts_once_in_each_text_that_holds_it() -> None:
    assert phrase_counts(["so so good", "so"], max_n=2) == {"so": 2, "good": 1, "so so": 1, "so good": 1}


def test_what_exploded_by_hand() -> None:
    before, now = {"so": 3, "good": 1}, {"so": 6, "good": 7, "so good": 6, "rare": 1}
    found = exploded(before, 9, now, 9, min_count=2)
    # so good: 7/10 over 1/10. good: 8/10 over 2/10. "so" is in no text without "so good", "rare" in too few.
    assert found == [
        Exploded("so good", 0, 6 / 9, pytest.approx(7)),
        Exploded("good", 1 / 9, 7 / 9, pytest.approx(4)),
    ]
    # Of half as many texts a share is the same: 4/5 over 1/10 instead.
    assert exploded({}, 9, {"x": 3}, 4, min_count=2) == [Exploded("x", 0, 3 / 4, pytest.approx(8))]
