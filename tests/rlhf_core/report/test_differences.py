import html
import re

from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.report.differences import marked
from rlhf_core.report.html import text


def test_what_only_one_of_them_says_is_marked_in_it() -> None:
    assert marked("so good and warm today", "so good but cold today") == (
        "so good <del>and warm </del>today",
        "so good <ins>but cold </ins>today",
    )


def test_equal_texts_have_no_mark() -> None:
    assert marked("the same\nwords", "the same\nwords") == ("the same\nwords",) * 2


def test_a_single_word_in_the_middle_is_no_agreement() -> None:
    # Only "the" is in both: it would be an island among marks.
    assert marked("sat by the sea", "burned the house down") == (
        "<del>sat by the sea</del>",
        "<ins>burned the house down</ins>",
    )


def test_a_single_word_at_both_beginnings_or_both_ends_is_kept() -> None:
    assert marked("a cat", "a dog") == ("a <del>cat</del>", "a <ins>dog</ins>")
    assert marked("red wine", "old wine") == ("<del>red </del>wine", "<ins>old </ins>wine")


def test_an_empty_text_against_another_is_all_mark() -> None:
    assert marked("", "new") == ("", "<ins>new</ins>")
    assert marked("", "") == ("", "")


WORDS = st.lists(st.sampled_from(["a", "the", "<b>", "&amp;", "\u202e", "\n", "  ", "x"]), max_size=12)


@given(WORDS, WORDS)
def test_without_its_marks_each_text_is_whole(before: list[str], after: list[str]) -> None:
    old, new = " ".join(before), " ".join(after)
    for shown, whole, name in zip(marked(old, new), (old, new), ("del", "ins"), strict=True):
        unmarked = re.sub(rf"</?{name}>", "", shown)
        assert unmarked == text(whole)
        assert "\u202e" not in html.unescape(unmarked)
