"""What is wrong with rows, said so that it can be mended."""

from collections.abc import Sequence
from dataclasses import dataclass

NUM_SHOWN = 10


class InvalidSource(ValueError):
    """Rows that were refused, said in a sentence a line."""


@dataclass(frozen=True)
class RowMistake:
    """One field of one row that cannot be used."""

    file: str
    """The file, as seen from the source."""
    row: int
    """The line in JSON lines; elsewhere the row, counted from 1, a header not counted."""
    field: str
    """The column, by its name in the file, or empty where the whole row is meant."""
    sentence: str
    """What is wrong with it."""

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{self.file}, row {self.row}: {where}{self.sentence}"


class RefusedRow(ValueError):
    """A row that cannot be used: (field, sentence) for each of its mistakes."""

    def __init__(self, *mistakes: tuple[str, str]) -> None:
        super().__init__("; ".join(sentence for _, sentence in mistakes))
        self.mistakes = mistakes


def listed(mistakes: Sequence[RowMistake], num_bad: int) -> list[str]:
    """The first mistakes, one a line, and how many bad rows are not among them."""
    shown = mistakes[:NUM_SHOWN]
    left = num_bad - len({(mistake.file, mistake.row) for mistake in shown})
    return [*map(str, shown), *([f"and {left} more rows"] if left > 0 else [])]
