"""How much texts repeat themselves and each other: what shows when a policy has found one thing that pays.

A text is a row of tokens: words of a string, or token ids. No n-gram crosses from one text to the next.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_TOKEN = re.compile(r"\w+|[^\w\s]")

Row = Sequence[Hashable]
Gram = tuple[Hashable, ...]
Highest = tuple[int, int, int]
"""An n-gram's highest count in a row, that row's number, and the highest count in any other row."""
TokenType = TypeVar("TokenType", bound=Hashable)


def words(text: str) -> list[str]:
    """Words and punctuation marks, case kept."""
    return _TOKEN.findall(text)


def distinct_n(texts: Sequence[str], n: int) -> float:
    """The share of different n-grams of words among all of the texts together, 0 when there are none."""
    return distinct([words(text) for text in texts], n)


def distinct(rows: Sequence[Row], n: int) -> float:
    """The share of different n-grams among all n-grams of the rows together, 0 when there are none.

    distinct-n (Li et al., 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models").
    The share falls as texts are added: compare it only between equally many texts of about one length.
    """
    grams = [gram for row in rows for gram in _ngrams(row, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(text: str, n: int = 3) -> float:
    """The share of n-grams of words that occur earlier in the same text, 0 when there are none."""
    return repeated(words(text), n)


def repeated(row: Row, n: int = 3) -> float:
    """The share of n-grams that occur earlier in the same row, 0 when there are none.

    One minus the distinct-n (Li et al., 2016) of this row alone; Welleck et al. (2020) call it seq-rep-n.
    """
    return 1 - distinct([row], n) if len(row) >= n else 0.0


def duplicates(rows: Sequence[Row]) -> float:
    """The share of rows that say what an earlier row says, token by token: 1 - different rows / rows."""
    return 1 - len({tuple(row) for row in rows}) / len(rows) if rows else 0.0


def self_bleu(rows: Sequence[Row], max_n: int = 4) -> float:
    """The mean BLEU of each row with all others as references (Zhu et al., 2018), 0 for fewer than two rows.

    BLEU = BP * (p_1 * ... * p_N)^(1/N), p_n the share of a row's n-grams that some other row has, each
    counted as often as the row that has it most often (Papineni et al., 2002); unsmoothed, so that a row
    without one common n-gram of an order gives 0. A row shorter than `max_n` is judged by the orders it has.
    BP = exp(1 - r / c) for a row of c tokens whose nearest other has r > c, else 1. 1 means that every row
    is in another. One pass: an n-gram needs its two highest counts only, and whose the highest is.
    """
    if len(rows) < 2:
        return 0.0
    counts = [[Counter(_ngrams(row, n)) for n in range(1, max_n + 1)] for row in rows]
    shared = _shared(counts)
    lengths = [len(row) for row in rows]
    total = 0.0
    for number, of_row in enumerate(counts):
        shares = [_common(of_order, number, shared) for of_order in of_row if of_order]
        if shares and min(shares) > 0:
            others = lengths[:number] + lengths[number + 1 :]
            nearest = min(others, key=lambda length: (abs(length - lengths[number]), length))
            brevity = min(0.0, 1 - nearest / lengths[number])
            total += math.exp(brevity + sum(map(math.log, shares)) / len(shares))
    return total / len(rows)


def _shared(counts: Sequence[Sequence[Counter[Gram]]]) -> dict[Gram, Highest]:
    """The n-grams of any order that at least two rows hold."""
    alone: dict[Gram, tuple[int, int]] = {}
    shared: dict[Gram, Highest] = {}
    for number, of_row in enumerate(counts):
        for of_order in of_row:
            known = of_order.keys() & alone.keys()
            for gram in known:
                count = of_order[gram]
                highest, owner, second = shared.get(gram, (*alone[gram], 0))
                shared[gram] = (
                    (count, number, highest) if count > highest else (highest, owner, max(second, count))
                )
            alone.update({gram: (count, number) for gram, count in of_order.items() if gram not in known})
    return shared


def _common(counts: Counter[Gram], number: int, shared: Mapping[Gram, Highest]) -> float:
    """The share of one row's n-grams of one order that another row has, as often as that row has them."""
    found = 0
    for gram in counts.keys() & shared.keys():
        highest, owner, second = shared[gram]
        found += min(counts[gram], second if owner == number else highest)
    return found / counts.total()


def phrase_counts(texts: Sequence[str], max_n: int = 3) -> dict[str, int]:
    """In how many texts each n-gram of up to `max_n` words occurs, its words joined by spaces."""
    found: Counter[str] = Counter()
    for text in texts:
        row = words(text)
        found.update({" ".join(gram) for n in range(1, max_n + 1) for gram in _ngrams(row, n)})
    return dict(found)


@dataclass(frozen=True)
class Exploded:
    """An n-gram that far more texts hold than before."""

    phrase: str
    """Its words, a space between any two."""
    before: float
    """Share of the earlier texts that hold it."""
    now: float
    """Share of the later ones."""
    growth: float
    """The smoothed share now over the smoothed share before."""


def exploded(
    before: Mapping[str, float], num_before: int, now: Mapping[str, float], num_now: int, min_count: float
) -> list[Exploded]:
    """N-grams by how much more common they became, the most first; phrases to numbers of texts, from both.

    growth = ((now + 1) / (num_now + 1)) / ((before + 1) / (num_before + 1)): one more text holds everything
    on either side, so that a phrase never seen before has a growth too, and a rare one no large one.
    Phrases in fewer than `min_count` texts are left out, and so is each that is part of a longer one in as
    many texts: "so" says nothing that "so happy" does not.
    """
    common = {phrase: count for phrase, count in now.items() if count >= min_count}
    parts = {part for phrase, count in common.items() for part in _parts(phrase) if common.get(part) == count}
    found = [
        Exploded(
            phrase,
            before.get(phrase, 0) / num_before,
            count / num_now,
            (count + 1) / (num_now + 1) * (num_before + 1) / (before.get(phrase, 0) + 1),
        )
        for phrase, count in common.items()
        if phrase not in parts
    ]
    return sorted(found, key=lambda one: (-one.growth, -len(one.phrase), one.phrase))


def _parts(phrase: str) -> Iterator[str]:
    """Every shorter n-gram inside a phrase."""
    row = phrase.split(" ")
    for n in range(1, len(row)):
        yield from map(" ".join, _ngrams(row, n))


def _ngrams(row: Sequence[TokenType], n: int) -> Iterator[tuple[TokenType, ...]]:
    if n < 1:
        raise ValueError(f"n-grams of length {n} do not exist: n is 1 or more.")
    return zip(*(row[start:] for start in range(n)), strict=False)
