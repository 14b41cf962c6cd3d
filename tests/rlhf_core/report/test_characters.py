from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.report.characters import shorten, visible


def test_line_ends_become_of_one_kind_and_long_text_is_cut() -> None:
    assert shorten("a\r\nb\rc\n", limit=4) == "a\nb\n…"
    assert shorten("abcd", limit=4) == "abcd"


@given(st.characters())
def test_what_has_a_shape_is_itself_and_the_rest_a_sign(character: str) -> None:
    shown = visible(character)
    assert shown == character or not character.isprintable()
    assert all(c.isprintable() or c.isspace() for c in shown)
