"""Two texts side by side: what only one of them says is marked in it."""

import re
from difflib import SequenceMatcher

from rlhf_core.report.html import Html, join, tag


def marked(before: str, after: str) -> tuple[Html, Html]:
    """Both texts, the words of `before` that went as `<del>`, those of `after` that came as `<ins>`.

    A single word in common is no agreement, unless both begin or end with it: else every "the" would
    tear two different texts to pieces.
    """
    old, new = _words(before), _words(after)
    kept = [
        (i, j, size)
        for i, j, size in SequenceMatcher(
            None, [word.strip() for word in old], [word.strip() for word in new], autojunk=False
        ).get_matching_blocks()
        if size > 1 or i == j == 0 or (i + size == len(old) and j + size == len(new))
    ]
    return (
        _mark("del", old, [(i, i + size) for i, _, size in kept]),
        _mark("ins", new, [(j, j + size) for _, j, size in kept]),
    )


def _words(text: str) -> list[str]:
    """The words, each with the space after it; nothing is lost."""
    return re.findall(r"\S+\s*|\A\s+", text)


def _mark(name: str, words: list[str], common: list[tuple[int, int]]) -> Html:
    pieces, done = [], 0
    for start, end in common:
        if start > done:
            pieces.append(tag(name, "".join(words[done:start])))
        pieces.append(join(words[start:end]))
        done = end
    return join(pieces)
