"""Markdown's pieces, and others' text among them: shown as it is, and unable to be anything but text."""

import re
from collections.abc import Iterable, Sequence

from rlhf_core.report.characters import MAX_CHARACTERS, shorten, visible

_WORD_JOINER = "\u2060"
# Entities for HTML and for the border of a table's cell: not every renderer knows a backslash before those.
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"} | {sign: f"\\{sign}" for sign in "\\`*_[]~$"}
)
# Many renderers make links of bare addresses in what is left after unescaping, so that no escape stops them.
_ADDRESS = re.compile(r"://|@|(?<=\w)\.(?=[^\W\d])")
_BLOCK_START = re.compile(r"\A(\d*)([-+=#:.)])")


def escape(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text as one line of inert Markdown, cut at `limit` characters.

    It makes no link, image, HTML, emphasis, heading or list and leaves no table cell. Line ends are shown
    as ⏎, control and format characters by their code; addresses get word joiners, which have no width.
    """
    shown = "".join(map(visible, shorten(text, limit))).translate(_ESCAPES)
    shown = _ADDRESS.sub(rf"{_WORD_JOINER}\g<0>{_WORD_JOINER}", shown)
    return _BLOCK_START.sub(r"\1\\\2", shown)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def code_block(text: str, language: str) -> str:
    """The text in a fence longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
