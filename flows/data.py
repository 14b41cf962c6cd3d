"""What a file, a folder or a dataset holds, before a run is given it."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, cast

from rich.console import Console

from flows.terminal import safe
from rlhf_core.records import Demonstration, ImportedPreference, Prompt
from rlhf_core.settings import InvalidSettings, Json
from rlhf_core.sources import (
    FileSource,
    HubSource,
    Reading,
    demonstrations,
    kind_of,
    preferences,
    prompts,
)

Kind = Literal["prompts", "preferences", "demonstrations"]
Record = Prompt | ImportedPreference | Demonstration
AnyReading = Reading[Prompt] | Reading[ImportedPreference] | Reading[Demonstration]

HUB = "hub:"
NUM_EXAMPLES = 3
SHOWN_CHARACTERS = 300


def source_at(place: str, columns: Sequence[str] = ()) -> FileSource | HubSource:
    """The source at a path, or at `hub:owner/name`; `columns` are written as field=column."""
    pairs = [text.partition("=") for text in columns]
    for field, _, column in pairs:
        if not field or not column:
            raise InvalidSettings(
                f"--columns {field!r}: write it as field=column, for instance prompt=question"
            )
    mapping = {field: column for field, _, column in pairs}
    if place.startswith(HUB):
        return HubSource(id=place.removeprefix(HUB), columns=mapping)
    if not Path(place).exists():
        raise InvalidSettings(
            f"there is no file or folder {place!r}; a dataset of the hub is {HUB}owner/name"
        )
    return FileSource(path=place, columns=mapping)


def describe(
    source: FileSource | HubSource, kind: Kind | None = None, limit: int | None = None
) -> dict[str, Json]:
    """What a source holds: schemas, bad rows, lengths and examples of its first `limit` records, or of all.

    Bad rows refuse nothing here; `refused` says whether a run would refuse the source for them.
    """
    found = kind or kind_of(source)
    lenient = _reading(source.model_copy(update={"max_bad_share": 1.0}), found)
    lengths: dict[str, array[int]] = {}
    examples: list[Json] = []
    records: Iterator[Record] = iter(lenient)
    for record in islice(records, limit):
        texts = _texts(record)
        for name, text in texts.items():
            lengths.setdefault(name, array("L")).append(len(text))
        if len(examples) < NUM_EXAMPLES:
            examples.append({**texts, **_told(record)})
    allowed = _reading(source, found).allowed_share
    return {
        "source": source.name,
        "kind": found,
        "schemas": dict(lenient.recognised),
        "rows": lenient.num_rows,
        "records": lenient.num_records,
        "bad_rows": lenient.num_bad,
        "allowed_bad_share": allowed,
        "refused": lenient.num_bad > allowed * lenient.num_rows,
        "mistakes": [str(mistake) for mistake in lenient.mistakes],
        "characters": {name: _spread(counted) for name, counted in lengths.items()},
        "examples": examples,
    }


def _reading(source: FileSource | HubSource, kind: str) -> AnyReading:
    readers: Mapping[str, AnyReading] = {
        "prompts": prompts(source),
        "preferences": preferences(source),
        "demonstrations": demonstrations(source),
    }
    return readers[kind]


def _texts(record: Record) -> dict[str, str]:
    if isinstance(record, Prompt):
        return {"prompt": record.shown}
    if isinstance(record, Demonstration):
        return {"prompt": record.prompt.shown, "response": record.response}
    return {"prompt": record.prompt.shown, "a": record.completion_a, "b": record.completion_b}


def _told(record: Record) -> dict[str, str]:
    return {"choice": record.choice.value} if isinstance(record, ImportedPreference) else {}


def _spread(lengths: "array[int]") -> dict[str, Json]:
    """The least, the middle, the 95th of a hundred and the greatest length, each one that occurs."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return {
        "min": ordered[0],
        "median": ordered[last // 2],
        "p95": ordered[last * 95 // 100],
        "max": ordered[last],
    }


def show(found: Mapping[str, Json], console: Console) -> None:
    """The description for people; a row's text cannot style the terminal or command it."""
    schemas = cast(dict[str, str], found["schemas"])
    lines = [
        f"{found['source']}: {found['records']} {found['kind']}",
        f"{found['rows']} rows, {found['bad_rows']} bad",
        *(f"recognised in {file}: {schema}" for file, schema in schemas.items()),
        *(f"bad: {mistake}" for mistake in cast(list[str], found["mistakes"])),
    ]
    if found["refused"]:
        share = cast(float, found["allowed_bad_share"])
        lines.append(f"a run would refuse it: {share:.2%} of the rows may be bad (`max_bad_share`)")
    for name, spread in cast(dict[str, dict[str, int]], found["characters"]).items():
        numbers = ", ".join(f"{what} {number}" for what, number in spread.items())
        lines.append(f"characters of {name}: {numbers}")
    for number, example in enumerate(cast(list[dict[str, str]], found["examples"]), start=1):
        lines += ["", f"example {number}", *(f"{name}: {_short(text)}" for name, text in example.items())]
    console.print("\n".join(map(safe, lines)), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _short(text: str) -> str:
    left = len(text) - SHOWN_CHARACTERS
    return text if left <= 0 else f"{text[:SHOWN_CHARACTERS]}... and {left} more characters"
