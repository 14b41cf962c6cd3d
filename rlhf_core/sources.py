"""Where rows come from: prompts out of JSONL files, and the Parquet files that row sets are kept in.

Row sets are written by `datasets`, and so carry their features for whoever loads them; they are read by
pyarrow, which needs no cache on disk.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rlhf_core import prompts_data
from rlhf_core.artifacts import canonical, sha256
from rlhf_core.records import Prompt
from rlhf_core.settings import Settings

NUM_SHOWN = 10
NO_ID = "without an id"
# The order decides: a bool is an int.
SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}

RowType = TypeVar("RowType", bound=Settings)


class InvalidSource(ValueError):
    """Rows that were refused, said in a sentence a line."""


class PackagedPrompts(Settings):
    """Prompts that come with the package."""

    type: Literal["packaged"] = "packaged"
    """Prompts that come with the package."""
    name: Literal["openings", "chats"] = "openings"
    """`openings` are plain texts that a base model continues, `chats` are conversations to answer."""

    def file(self) -> "PromptFile":
        """The packaged file."""
        return PromptFile(path=str(prompts_data.path(f"{self.name}.jsonl")))


class PromptFile(Settings):
    """A JSONL file: one prompt a line, as text or as messages; keys that are not named here are ignored."""

    type: Literal["jsonl"] = "jsonl"
    """A JSONL file of your own."""
    path: str = Field(min_length=1)
    """The file."""
    text_field: str = "text"
    """The key of a plain text to continue."""
    messages_field: str = "messages"
    """The key of a conversation to answer: a list of {role, content}, the last not the assistant's."""
    id_field: str = "id"
    """The key of the prompt's id; where a row has none, its content gives one."""
    kind_field: str = "kind"
    """The key of the label that slices metrics; where a row has none, it is empty."""

    def file(self) -> "PromptFile":
        """This file."""
        return self


PromptSource = Annotated[PackagedPrompts | PromptFile, Field(discriminator="type")]


def read_prompts(source: PackagedPrompts | PromptFile) -> list[Prompt]:
    """All prompts of a source, in its order; raises `InvalidSource` that names every row it refuses."""
    file = source.file()
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    mistakes: list[str] = []
    for number, line in _lines(Path(file.path)):
        try:
            prompt = _prompt(file, line)
            first = line_of.setdefault(prompt.id, number)
            if first != number:
                made = ", made from its content," if prompt.id == _content_id(prompt) else ""
                raise InvalidSource(f"{file.id_field}: {prompt.id!r}{made} is already the id of line {first}")
            prompts.append(prompt)
        except InvalidSource as error:
            mistakes.append(f"line {number}: {error}")
    if mistakes:
        more = [f"and {len(mistakes) - NUM_SHOWN} more"] if len(mistakes) > NUM_SHOWN else []
        raise InvalidSource("\n".join([f"{file.path}: refused rows", *mistakes[:NUM_SHOWN], *more]))
    if not prompts:
        raise InvalidSource(f"{file.path}: no prompt in it: there is nothing to continue or to answer")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, one by one, with their numbers."""
    try:
        with path.open("rb") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
    except OSError as error:
        raise InvalidSource(f"{path}: {error.strerror}") from error


def _prompt(file: PromptFile, line: bytes) -> Prompt:
    """The prompt of a line; raises `InvalidSource` that names the keys as the file does."""
    keys = {
        "id": file.id_field,
        "kind": file.kind_field,
        "text": file.text_field,
        "messages": file.messages_field,
    }
    row = _parse(line)
    values = {name: row[key] for name, key in keys.items() if row.get(key) is not None}
    form = [name for name in ("text", "messages") if name in values]
    if len(form) != 1:
        raise InvalidSource(f"{file.text_field}, {file.messages_field}: one of them is needed, and not both")
    try:
        prompt = Prompt.model_validate({"id": NO_ID} | values)
    except ValidationError as error:
        raise InvalidSource("; ".join(_mistakes(error, keys, form[0]))) from error
    for where, text in _texts(prompt, keys):
        _check_text(where, text)
    return prompt if "id" in values else prompt.model_copy(update={"id": _content_id(prompt)})


def _content_id(prompt: Prompt) -> str:
    """An id that depends on nothing but what the policy is asked."""
    content = prompt.to_json()["messages"] if prompt.text is None else prompt.text
    return sha256(canonical(content))[:16]


def _parse(line: bytes) -> dict[str, object]:
    """The JSON object of a line."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidSource(f"not UTF-8 from byte {error.start + 1} on") from error
    except json.JSONDecodeError as error:
        raise InvalidSource(f"not JSON from character {error.pos + 1} on: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise InvalidSource(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidSource(f"not a JSON object: {reprlib.repr(row)}")
    return row


def _mistakes(error: ValidationError, keys: Mapping[str, str], form: str) -> Iterator[str]:
    """What pydantic refuses, under the file's own keys; a whole row's mistake lies in its content."""
    for item in error.errors(include_url=False):
        first, *rest = item["loc"] or (form,)
        where = ".".join(map(str, [keys[str(first)], *rest]))
        given = item["input"]
        shown = "" if isinstance(given, dict | Prompt) else f" (given: {reprlib.repr(given)})"
        yield f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}"


def _texts(prompt: Prompt, keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """All texts of a prompt with where the file has them."""
    yield keys["id"], prompt.id
    yield keys["kind"], prompt.kind
    yield keys["text"], prompt.text or ""
    for number, message in enumerate(prompt.messages or ()):
        yield f"{keys['messages']}.{number}.role", message.role
        yield f"{keys['messages']}.{number}.content", message.content


def _check_text(where: str, text: str) -> None:
    """Raise for text that a tokenizer or a Parquet file cannot take."""
    if "\0" in text:
        raise InvalidSource(f"{where}: a null byte at character {text.index(chr(0)) + 1}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidSource(f"{where}: a lone surrogate, half a character, at {error.start + 1}") from error


def write_rows(rows: Sequence[Settings], path: Path) -> None:
    """Write rows of one model as Parquet: its fields are the columns, equal rows are equal bytes."""
    models = {type(row) for row in rows}
    if len(models) != 1:
        raise ValueError(
            f"{path.name}: rows of {sorted(model.__name__ for model in models) or 'nothing'}: "
            "the columns are those of one model, so there must be a row, and no other model's."
        )
    from datasets import Dataset, disable_progress_bars  # type: ignore[import-untyped]

    disable_progress_bars()
    table = pa.Table.from_pylist([row.to_json() for row in rows], schema=_schema(models.pop()))
    Dataset(table).to_parquet(path)


def count_rows(path: Path) -> int:
    """The number of rows in a Parquet file, from its footer alone."""
    return int(pq.read_metadata(path).num_rows)


def read_rows(path: Path, model: type[RowType]) -> list[RowType]:
    """The rows of a Parquet file, validated into `model`."""
    rows = pq.ParquetFile(path).read().to_pylist()
    try:
        return TypeAdapter(list[model]).validate_python(rows)  # type: ignore[valid-type]
    except ValidationError as error:
        raise InvalidSource(f"{path}: holds no rows of {model.__name__}: {error}") from error


def _schema(model: type[BaseModel]) -> pa.Schema:
    """The columns of a model, from its annotations alone: no value decides a type."""
    return pa.schema([(name, _arrow_type(field.annotation)) for name, field in model.model_fields.items()])


def _arrow_type(annotation: object) -> pa.DataType:
    """How Parquet keeps a field; every type can be null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return _arrow_type(next(argument for argument in arguments if argument is not NoneType))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return pa.list_(_arrow_type(arguments[0]))
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return pa.struct(list(_schema(annotation)))
        for python, arrow in SCALARS.items():
            if issubclass(annotation, python):
                return arrow
    raise TypeError(f"no Parquet column for a field of type {annotation}: rows hold texts, numbers and lists")
