import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rlhf_core.report.markdown import code_block, escape, table

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
JOINER = "\u2060"

NASTY = [
    "</td><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil.example/x.png)",
    "[x](//evil.example)",
    "[x]: http://evil.example",
    "<http://evil.example>",
    "`code` ``` fence",
    "a | b \\| c \\",
    "**bold** __bold__ *it* _it_ ~~gone~~ $x$",
    "# heading",
    "---",
    "- item",
    "+ item",
    "12. item",
    "3) item",
    "> quote",
    "&lt;script&gt; &#60; &nbsp;",
    "    indented code",
]


def _text_tokens(markdown: str) -> list[tuple[str, str]]:
    """(type, content) of everything that CommonMark sees in `markdown`, blocks and what is inside them."""
    found = []
    for block in RENDERER.parse(markdown):
        found += (
            [(t.type, t.content) for t in block.children]
            if block.children is not None
            else [(block.type, "")]
        )
    return found


def _seen(markdown: str) -> str:
    return "".join(content for kind, content in _text_tokens(markdown) if kind == "text").replace(JOINER, "")


@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_is_one_paragraph_of_plain_text(text: str) -> None:
    assert _text_tokens(text) != [
        ("paragraph_open", ""),
        ("text", text),
        ("paragraph_close", ""),
    ]  # it is nasty
    kinds = {kind for kind, _ in _text_tokens(escape(text))}
    assert kinds == {"paragraph_open", "text", "paragraph_close"}
    assert _seen(escape(text)) == text.strip()


PLAIN = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"), include_characters=" ")
    | st.sampled_from("\\`*_[]()<>&|#!~:/@.-+= w")
)


@given(PLAIN.filter(lambda text: text.strip(" ") != ""))
@example("\\|")
@example("1. x")
@example("http://a.b/c?d=e@f.g")
def test_any_text_is_shown_as_it_is_and_stays_in_its_cell(text: str) -> None:
    cells = _text_tokens(table(("head", "other"), [(escape(text), "after")]))
    assert [kind for kind, _ in cells if kind != "text"] == [
        *("table_open", "thead_open", "tr_open"),
        *("th_open", "th_close") * 2,
        *("tr_close", "thead_close", "tbody_open", "tr_open"),
        *("td_open", "td_close") * 2,
        *("tr_close", "tbody_close", "table_close"),
    ]
    contents = [content.replace(JOINER, "") for kind, content in cells if kind == "text" and content]
    assert contents == ["head", "other", text.strip(" "), "after"]
    assert _seen(escape(text)) == text.strip(" ")


@given(st.text())
def test_what_is_shown_is_one_line_without_unseen_characters(text: str) -> None:
    shown = escape(text).replace(JOINER, "")
    assert len(shown.splitlines()) <= 1
    assert {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"} == set()


def test_line_ends_and_unseen_characters_have_signs() -> None:
    assert escape("a\nb\r\nc\rd\te") == "a⏎b⏎c⏎d⇥e"
    assert (
        escape("user\u202egnp.exe\u200b\0\x1b")
        == f"user⟨U+202E⟩gnp{JOINER}.{JOINER}exe⟨U+200B⟩⟨U+0000⟩⟨U+001B⟩"
    )
    assert escape("\u2028\u2029") == "⟨U+2028⟩⟨U+2029⟩"
    assert escape("\ud800") == "⟨U+D800⟩"


@pytest.mark.parametrize(
    "text", ["http://evil.example", "HTTPS://x", "www.evil.example", "me@evil.example", "@me"]
)
def test_no_bare_address_is_left_whole_for_a_renderer_to_link(text: str) -> None:
    shown = escape(text)
    assert shown.replace(JOINER, "") == text
    assert not any(part in shown for part in ("://e", "http:", "HTTPS:", "www.", ".e", "e@", "@m", "@e"))


def test_numbers_and_plain_prose_are_left_alone() -> None:
    prose = "It's 3.14 (about), isn't it? Yes: a well-known one; nearly 22/7!"
    assert escape(prose) == prose


def test_long_text_is_cut_before_it_is_escaped() -> None:
    # 5 of 6 characters, each then an entity of 4: a cut after escaping would leave a torn one.
    assert escape("<" * 6, limit=5) == "&lt;" * 5 + "…"
    assert escape("<" * 5, limit=5) == "&lt;" * 5
    assert len(escape("a" * 1_000_000)) == 601


def test_a_code_block_ends_where_its_text_ends() -> None:
    text = "pattern: |\n```\n````\n# x"
    (block,) = RENDERER.parse(code_block(text, "yaml"))
    assert (block.type, block.info, block.content) == ("fence", "yaml", text + "\n")
