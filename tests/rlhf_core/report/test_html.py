import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.report.html import Html, join, link, table, tag, text
from tests.rlhf_core.report.parsed import events


@given(st.text())
def test_text_is_nothing_but_text(written: str) -> None:
    found = events(tag("p", written, title=written))
    assert [kind for kind, _, _ in found if kind != "text"] == ["start", "end"]
    shown = "".join(content for kind, content, _ in found if kind == "text")
    assert found[0][2] == (("title", shown),)
    assert all(c.isprintable() or c.isspace() for c in shown)


def test_what_is_markup_already_stands_as_it_is_and_a_plain_string_never_does() -> None:
    assert tag("p", Html("<b>x</b>"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"
    assert text(text("&")) == "&amp;"
    assert tag("p", str(Html("<b>x</b>")) + "") == "<p>&lt;b&gt;x&lt;/b&gt;</p>"
    assert join(("<", Html("<br>"))) == "&lt;<br>"


def test_line_ends_stay_and_unseen_characters_have_signs() -> None:
    assert text("a\nb\tc\u202ed\0\ud800\u2028") == "a\nb⇥c⟨U+202E⟩d⟨U+0000⟩⟨U+D800⟩⟨U+2028⟩"


def test_attributes_have_their_names_in_html() -> None:
    assert tag("b", class_="x", aria_label='"') == '<b class="x" aria-label="&quot;"></b>'


def test_a_table_names_its_column_in_every_cell() -> None:
    assert table(("n", "<v>"), [("a", Html("<i>1</i>"))], "numbers") == (
        '<table class="numbers"><thead><tr><th scope="col">n</th><th scope="col">&lt;v&gt;</th></tr></thead>'
        '<tbody><tr><td data-label="n">a</td><td data-label="&lt;v&gt;"><i>1</i></td></tr></tbody></table>'
    )


def test_an_address_of_the_web_is_a_link() -> None:
    assert link("MLflow", "http://127.0.0.1/#/x?a=1&b=2") == (
        '<a href="http://127.0.0.1/#/x?a=1&amp;b=2" rel="noreferrer">MLflow</a>'
    )


@pytest.mark.parametrize(
    "target", ["javascript:alert(1)", " http://x", "data:text/html,<script>", "//evil.example", "rlhf status"]
)
def test_anything_else_is_shown_and_never_followed(target: str) -> None:
    assert "<a" not in link("name", target)
    assert tag("code", target) in link("name", target)
