"""Others' text in the terminal: model output may hold sequences that move the cursor or set the title."""

import unicodedata

_KEPT = {"\n", "\t"}
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def safe(text: str) -> str:
    """The text with every control and format character shown by its code, line ends and tabs as they are."""
    whole = text.replace("\r\n", "\n")
    return "".join(map(_visible, whole))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _UNSEEN:
        return character
    return f"⟨U+{ord(character):04X}⟩"
