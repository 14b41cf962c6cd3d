"""Prompts, preferences and demonstrations out of any source, row by row."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
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


class Reading(Generic[T]):
    """The records of a source, read as they are iterated; each iteration reads anew.

    Rows that cannot be used are counted, and the first of them kept. More of them than the source allows, or
    no good row at all, raises `InvalidSource`: at the end, and after a thousand bad rows as soon as it is so.
    """

    def __init__(
        self,
        source: FileSource | HubSource,
        kind: str,
        schemas: Sequence[Schema[T]],
        default_share: float,
        checked: Callable[[], Callable[[Fields, T], None]],
    ) -> None:
        self.source, self.kind = source, kind
        self.allowed_share = default_share if source.max_bad_share is None else source.max_bad_share
        self._schemas, self._checked = schemas, checked
        self._start()

    def _start(self) -> None:
        self.num_rows = self.num_bad = self.num_records = 0
        self.mistakes: list[RowMistake] = []
        """Those of the first bad rows."""
        self._found: dict[str, Schema[T]] = {}

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
        check = self._checked()
        for row in self.source.rows():
            self.num_rows += 1
            try:
                records = self._records(row, check)
            except RefusedRow as error:
                self._note(row, error)
                continue
            self.num_records += len(records)
            yield from records
        if self.refused or not self.num_records:
            raise InvalidSource(self._refusal())

    def _records(self, row: Row, check: Callable[[Fields, T], None]) -> list[T]:
        """All records of a row, or its refusal."""
        if row.values is None:
            raise RefusedRow(("", row.mistake))
        as_messages = self.source.plain_text == "message"
        fields = Fields(row.values, self.source.columns, as_messages, row.file, row.number)
        if row.file not in self._found:
            self._found[row.file] = self._recognise(fields)
        records = list(self._found[row.file].read(fields))
        for record in records:
            check(fields, record)
        return records

    def _recognise(self, row: Fields) -> Schema[T]:
        """The schema of a file, by its first row that has one."""
        for schema in self._schemas:
            if schema.recognises(row):
                return schema
        raise RefusedRow(("", f"no {self.kind} in the columns {', '.join(row.values) or '(none)'}"))

    def _note(self, row: Row, error: RefusedRow) -> None:
        self.num_bad += 1
        if self.num_bad <= NUM_SHOWN:
            self.mistakes += [RowMistake(row.file, row.number, *mistake) for mistake in error.mistakes]
        if self.num_bad >= EARLY_VERDICT and self.refused:
            raise InvalidSource(self._refusal())

    def _refusal(self) -> str:
        if not self.num_bad:
            return f"{self.source.name}: no {self.kind} in its {self.num_rows} rows"
        head = f"{self.source.name}: {self.num_bad} of {self.num_rows} rows refused"
        if self.refused:
            head += f", and {self.allowed_share:.2%} may be: mend them, or allow more by `max_bad_share`"
        lines = [head, *listed(self.mistakes, self.num_bad)]
        if not self._found:
            known = "; ".join(schema.name for schema in self._schemas)
            lines.append(
                f"Schemas that have {self.kind}: {known}. For others, say by `columns` where each field is."
            )
        return "\n".join(lines)


def prompts(source: PackagedPrompts | FileSource | HubSource) -> Reading[Prompt]:
    """The prompts of a source; an id that was there before makes a row bad."""
    table = source.table() if isinstance(source, PackagedPrompts) else source
    return Reading(table, "prompts", PROMPTS, 0.0, _ids_once)


def preferences(source: FileSource | HubSource) -> Reading[ImportedPreference]:
    """The judgements of a source; a row that has several, like a tree of ranked replies, gives them all."""
    return Reading(source, "preferences", PREFERENCES, BAD_LABELLED_SHARE, _unchecked)


def demonstrations(source: FileSource | HubSource) -> Reading[Demonstration]:
    """The demonstrations of a source."""
    return Reading(source, "demonstrations", DEMONSTRATIONS, BAD_LABELLED_SHARE, _unchecked)


def read_prompts(source: PackagedPrompts | FileSource | HubSource) -> list[Prompt]:
    """All prompts of a source, in its order; raises `InvalidSource` that names the rows it refuses."""
    return list(prompts(source))


def kind_of(source: FileSource | HubSource) -> str:
    """What a source can be read as, by its first row that can be: the most that is recognised in it."""
    kinds: dict[str, Sequence[Schema[Settings]]] = {
        "preferences": PREFERENCES,
        "demonstrations": DEMONSTRATIONS,
    }
    for row in source.rows():
        if row.values is not None:
            fields = Fields(row.values, source.columns)
            return next(
                (k for k, schemas in kinds.items() if any(s.recognises(fields) for s in schemas)), "prompts"
            )
    return "prompts"


def _unchecked() -> Callable[[Fields, Settings], None]:
    return lambda row, record: None


def _ids_once() -> Callable[[Fields, Prompt], None]:
    """A check that no prompt's id was there before; it keeps eight bytes of each id's hash."""
    seen: dict[str, dict[int, int]] = {}

    def check(row: Fields, prompt: Prompt) -> None:
        short = int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=8).digest(), "big")
        for file, rows in seen.items():
            if short in rows:
                made = ", made from its content," if prompt.id == content_id(prompt) else ""
                first = f"row {rows[short]}" + (f" of {file}" if file != row.file else "")
                raise RefusedRow((row.column("id"), f"{prompt.id!r}{made} is already the id of {first}"))
        seen.setdefault(row.file, {})[short] = row.number

    return check
