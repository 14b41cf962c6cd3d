"""Prompts, preferences and demonstrations out of any source, row by row."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from rlhf_core.records import Demonstration, ImportedPreference, Prompt
from rlhf_core.settings import Settings
from rlhf_core.sources.demonstration_schemas import DEMONSTRATIONS
from rlhf_core.sources.fields import Fields, content_id
from rlhf_core.sources.files import Row
from rlhf_core.sources.mistakes import NUM_SHOWN, InvalidSource, RefusedRow, RowMistake, listed
from rlhf_core.sources.places import FileSource, HubSource, PackagedPrompts
from rlhf_core.sources.preference_schemas import PREFERENCES
from rlhf_core.sources.prompt_schemas import PROMPTS
from rlhf_core.sources.schemas import Schema

# A mapping that is wrong for all rows ends a long source this soon.
EARLY_VERDICT = 1000
BAD_LABELLED_SHARE = 0.02

T = TypeVar("T", bound=Settings)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What rows are read as."""

    name: str
    schemas: tuple[Schema[T], ...]
    bad_share: float
    """The share of bad rows that is allowed where the source does not say."""
    are_prompts: bool = False
    """Whether a row is itself a prompt, so that its `id` and `kind` are the prompt's."""


PROMPT_KIND = Kind("prompts", PROMPTS, 0.0, are_prompts=True)
PREFERENCE_KIND = Kind("preferences", PREFERENCES, BAD_LABELLED_SHARE)
DEMONSTRATION_KIND = Kind("demonstrations", DEMONSTRATIONS, BAD_LABELLED_SHARE)


class Reading(Generic[T]):
    """The records of a source, read as they are iterated; each iteration reads anew.

    Rows that cannot be used are counted, and the first of them kept. More of them than the source allows, or
    no good row at all, raises `InvalidSource`: at the end, and after a thousand bad rows as soon as it is so.
    """

    def __init__(self, source: FileSource | HubSource, kind: Kind[T]) -> None:
        self.source, self.kind = source, kind
        self.allowed_share = kind.bad_share if source.max_bad_share is None else source.max_bad_share
        self._start()

    def _start(self) -> None:
        self.num_rows = self.num_bad = self.num_records = 0
        self.mistakes: list[RowMistake] = []
        """Those of the first bad rows."""
        self._found: dict[str, Schema[T]] = {}
        self._ids: dict[str, dict[int, int]] = {}

    @property
    def recognised(self) -> dict[str, str]:
        """The schema of each file so far."""
        return {file: schema.name for file, schema in self._found.items()}

    @property
    def refused(self) -> bool:
        """Whether more rows are bad than the source allows."""
        return self.num_bad > self.allowed_share * self.num_rows

    def __iter__(self) -> Iterator[T]:
        self._start()
        for row in self.source.rows():
            self.num_rows += 1
            try:
                records = self._records(row)
            except RefusedRow as error:
                self._note(row, error)
                continue
            self.num_records += len(records)
            yield from records
        if self.refused or not self.num_records:
            raise InvalidSource(self._refusal())

    def _records(self, row: Row) -> list[T]:
        """All records of a row, or its refusal."""
        if row.values is None:
            raise RefusedRow(("", row.mistake))
        as_messages = self.source.plain_text == "message"
        fields = Fields(
            row.values, self.source.columns, as_messages, self.kind.are_prompts, row.file, row.number
        )
        if row.file not in self._found:
            self._found[row.file] = self._recognise(fields)
        records = list(self._found[row.file].read(fields))
        for record in records:
            if isinstance(record, Prompt):
                self._once(fields, record)
        return records

    def _once(self, row: Fields, prompt: Prompt) -> None:
        """Raise for an id that was there before; eight bytes of each id's hash are kept."""
        short = int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=8).digest(), "big")
        for file, rows in self._ids.items():
            if short in rows:
                made = ", made from its content," if prompt.id == content_id(prompt) else ""
                first = f"row {rows[short]}" + (f" of {file}" if file != row.file else "")
                raise RefusedRow((row.column("id"), f"{prompt.id!r}{made} is already the id of {first}"))
        self._ids.setdefault(row.file, {})[short] = row.number

    def _recognise(self, row: Fields) -> Schema[T]:
        """The schema of a file, by its first row that has one."""
        for schema in self.kind.schemas:
            if schema.recognises(row):
                return schema
        raise RefusedRow(("", f"no {self.kind.name} in the columns {', '.join(row.values) or '(none)'}"))

    def _note(self, row: Row, error: RefusedRow) -> None:
        self.num_bad += 1
        if self.num_bad <= NUM_SHOWN:
            self.mistakes += [RowMistake(row.file, row.number, *mistake) for mistake in error.mistakes]
        if self.num_bad >= EARLY_VERDICT and self.refused:
            raise InvalidSource(self._refusal())

    def _refusal(self) -> str:
        if not self.num_bad:
            return f"{self.source.name}: no {self.kind.name} in its {self.num_rows} rows"
        head = f"{self.source.name}: {self.num_bad} of {self.num_rows} rows refused"
        if self.refused:
            head += f", and {self.allowed_share:.2%} may be: mend them, or allow more by `max_bad_share`"
        lines = [head, *listed(self.mistakes, self.num_bad)]
        if not self._found:
            known = "; ".join(schema.name for schema in self.kind.schemas)
            lines.append(
                f"Schemas that have {self.kind.name}: {known}. "
                "For others, say by `columns` where each field is."
            )
        return "\n".join(lines)


def prompts(source: PackagedPrompts | FileSource | HubSource) -> Reading[Prompt]:
    """The prompts of a source; an id that was there before makes a row bad."""
    return Reading(source.table() if isinstance(source, PackagedPrompts) else source, PROMPT_KIND)


def preferences(source: FileSource | HubSource) -> Reading[ImportedPreference]:
    """The judgements of a source; a row that has several, like a tree of ranked replies, gives them all."""
    return Reading(source, PREFERENCE_KIND)


def demonstrations(source: FileSource | HubSource) -> Reading[Demonstration]:
    """The demonstrations of a source."""
    return Reading(source, DEMONSTRATION_KIND)


def read_prompts(source: PackagedPrompts | FileSource | HubSource) -> list[Prompt]:
    """All prompts of a source, in its order; raises `InvalidSource` that names the rows it refuses."""
    return list(prompts(source))


def kind_of(source: FileSource | HubSource) -> str:
    """What a source can be read as, by its first row: labelled rows where it is recognised as such."""
    labelled: tuple[Kind[ImportedPreference] | Kind[Demonstration], ...] = (
        PREFERENCE_KIND,
        DEMONSTRATION_KIND,
    )
    readable = (Fields(row.values, source.columns) for row in source.rows() if row.values is not None)
    for fields in islice(readable, 1):
        for kind in labelled:
            if any(schema.recognises(fields) for schema in kind.schemas):
                return kind.name
    return PROMPT_KIND.name
