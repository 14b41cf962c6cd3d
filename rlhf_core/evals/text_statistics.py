"""How much texts repeat themselves: what shows when a policy has found one sentence that pays."""

import re
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(r"\w+|[^\w\s]")


def distinct_n(texts: Sequence[str], n: int) -> float:
    """The share of different n-grams among all n-grams of the texts together, 0 when there are none.

    distinct-n (Li et al., 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models").
    Tokens are words and punctuation marks, case kept; no n-gram crosses from one text to the next. The share
    falls as texts are added: compare it only between equally many texts of about one length.
    """
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(text: str, n: int = 3) -> float:
    """The share of n-grams that occur earlier in the same text, 0 when there are none.

    One minus the distinct-n (Li et al., 2016) of this text alone; Welleck et al. (2020) call it seq-rep-n.
    """
    grams = list(_ngrams(text, n))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _ngrams(text: str, n: int) -> Iterable[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n-grams of length {n} do not exist: n is 1 or more.")
    tokens = _TOKEN.findall(text)
    return zip(*(tokens[start:] for start in range(n)), strict=False)
