"""Others' text before it is shown: as long as one reads, and with nothing in it that one does not see."""

import unicodedata

MAX_CHARACTERS = 600

_SIGNS = {"\n": "⏎", "\t": "⇥"}
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text with line ends of one kind, cut at `limit` characters."""
    whole = text.replace("\r\n", "\n").replace("\r", "\n").strip(" ")
    return whole if len(whole) <= limit else whole[:limit] + "…"


def visible(character: str) -> str:
    """A sign for a line end or tab, the code of any other character that has no shape of its own."""
    if character in _SIGNS:
        return _SIGNS[character]
    return f"⟨U+{ord(character):04X}⟩" if unicodedata.category(character) in _UNSEEN else character
