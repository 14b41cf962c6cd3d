"""One row under a mapping of columns, and records of it, refused in the file's own names."""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from rlhf_core.artifacts import canonical, sha256
from rlhf_core.records import Message, Prompt
from rlhf_core.settings import Settings
from rlhf_core.sources.files import Values
from rlhf_core.sources.mistakes import RefusedRow

NO_ID = "without an id"
# What other formats call the roles of chat templates.
ROLES = {"human": "user", "prompter": "user", "gpt": "assistant"}

RecordType = TypeVar("RecordType", bound=Settings)


@dataclass(frozen=True)
class Fields:
    """A row's values by our field names; a field that is not mapped is looked for under its own name."""

    values: Values
    columns: Mapping[str, str]
    messages_from_text: bool = False
    """Whether a plain prompt is a user's message."""
    is_prompt: bool = True
    """Whether the row is a prompt, so that its `id` and `kind` are the prompt's; of any other row only mapped
    ones are, and equal prompts get one id, from their content."""
    file: str = ""
    number: int = 0

    def column(self, field: str) -> str:
        """What the file calls a field."""
        return self.columns.get(field, field)

    def get(self, field: str) -> object:
        """The value of a field; None where the row has none."""
        column = self.column(field)
        if column in self.values:
            return self.values[column]
        value: object = self.values
        for part in column.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def need(self, field: str) -> object:
        """The value of a field that the row must have."""
        value = self.get(field)
        if value is None:
            raise RefusedRow(
                (self.column(field), f"missing; the row has {', '.join(self.values) or 'nothing'}")
            )
        return value

    def text(self, field: str) -> str:
        """The value of a field that must be text."""
        value = self.need(field)
        if not isinstance(value, str):
            raise RefusedRow((self.column(field), f"must be text (given: {reprlib.repr(value)})"))
        return value

    def columns_of(self, *fields: str) -> str:
        """Several fields in the file's names."""
        return ", ".join(map(self.column, fields))

    def record(
        self, model: type[RecordType], values: Values, names: Mapping[str, str], whole: str
    ) -> RecordType:
        """`values` as a record; `names` has the column of each field, `whole` that of a rule over all."""
        try:
            record = model.model_validate(values)
        except ValidationError as error:
            raise RefusedRow(*_mistakes(error, names, whole)) from error
        bad = [(where, wrong) for where, text in _texts(record, names) if (wrong := _unusable(text))]
        if bad:
            raise RefusedRow(*bad)
        return record

    def prompt(self, field: str, value: object = None) -> Prompt:
        """The prompt in a field, with the row's id and kind; `value` stands for what the field holds."""
        value = self.need(field) if value is None else value
        form = "messages" if isinstance(value, list | tuple) else "text"
        if form == "text" and self.messages_from_text and isinstance(value, str):
            form, value = "messages", [{"role": "user", "content": value}]
        return self.prompt_as(form, field, value)

    def prompt_as(self, form: str, field: str, value: object) -> Prompt:
        """The prompt in a field that must have one form, `text` or `messages`."""
        given = [name for name in ("id", "kind") if self.is_prompt or name in self.columns]
        named = {name: self.get(name) for name in given if self.get(name) is not None}
        names = {"id": self.column("id"), "kind": self.column("kind"), form: self.column(field)}
        content = _turns(value) if form == "messages" else value
        prompt = self.record(Prompt, {"id": NO_ID, **named, form: content}, names, names[form])
        return prompt if "id" in named else prompt.model_copy(update={"id": content_id(prompt)})

    def messages(self, field: str) -> tuple[Message, ...]:
        """The conversation in a field, in the roles of chat templates; one message is a list of one."""
        value = self.need(field)
        turns = _turns([value] if isinstance(value, dict) else value)
        column = self.column(field)
        return self.record(_Conversation, {"messages": turns}, {"messages": column}, column).messages


class _Conversation(Settings):
    messages: tuple[Message, ...]


def content_id(prompt: Prompt) -> str:
    """An id that depends on nothing but what the policy is asked."""
    content = prompt.to_json()["messages"] if prompt.text is None else prompt.text
    return sha256(canonical(content))[:16]


def _turns(value: object) -> object:
    """Messages under the names of chat templates, what is null left out; anything else as it is."""
    return [_turn(turn) for turn in value] if isinstance(value, list | tuple) else value


def _turn(value: object) -> object:
    if not isinstance(value, dict):
        return value
    turn = {name: part for name, part in value.items() if part is not None}
    if "from" in turn and "role" not in turn:
        renamed = {"from": "role", "value": "content"}
        turn = {renamed.get(name, name): part for name, part in turn.items()}
    role = turn.get("role")
    return turn | {"role": ROLES.get(role, role)} if isinstance(role, str) else turn


def _mistakes(error: ValidationError, names: Mapping[str, str], whole: str) -> Iterator[tuple[str, str]]:
    """What pydantic refuses, under the file's own names."""
    for item in error.errors(include_url=False):
        first, *rest = item["loc"] or (None,)
        where = ".".join(map(str, [names.get(str(first), str(first)), *rest])) if first else whole
        given = item["input"]
        shown = "" if isinstance(given, dict | Settings) else f" (given: {reprlib.repr(given)})"
        yield where, f"{item['msg'].removeprefix('Value error, ')}{shown}"


def _texts(record: Settings, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """All texts of a record with where the file has them; a prompt in it was looked at when it was made."""
    for field, value in record:
        where = names.get(field, field)
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, tuple):
            for number, message in enumerate(value):
                yield f"{where}.{number}.role", message.role
                yield f"{where}.{number}.content", message.content


def _unusable(text: str) -> str:
    """Why a tokenizer or a Parquet file cannot take a text; empty where it can."""
    if "\0" in text:
        return f"a null byte at character {text.index(chr(0)) + 1}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, half a character, at {error.start + 1}"
    return ""
