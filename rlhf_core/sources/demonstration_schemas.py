"""The schemas whose rows are prompts with a response."""

from collections.abc import Callable, Iterator

from rlhf_core.records import Demonstration, Prompt
from rlhf_core.sources.conversations import last_answer
from rlhf_core.sources.fields import Fields
from rlhf_core.sources.prompt_schemas import NAMED, as_json, instruction
from rlhf_core.sources.schemas import Schema


def _answered(prompt: str, response: str) -> Schema[Demonstration]:
    def read(row: Fields) -> Iterator[Demonstration]:
        yield _demonstration(row, row.prompt(prompt), response)

    return Schema(f"{prompt}/{response}", (prompt, response), NAMED, read)


def _instructed(response: str, *about: str) -> Schema[Demonstration]:
    def read(row: Fields) -> Iterator[Demonstration]:
        yield _demonstration(row, instruction(row), response)

    return Schema(f"instruction/{response}", ("instruction", response), (*about, *NAMED), read)


def _conversation(field: str) -> Schema[Demonstration]:
    def read(row: Fields) -> Iterator[Demonstration]:
        before, response = last_answer(row, field, row.messages(field))
        prompt = row.prompt(field, as_json(before))
        yield row.record(
            Demonstration,
            {"prompt": prompt, "response": response},
            {"response": row.column(field)},
            row.column(field),
        )

    return Schema(field, (field,), NAMED, read, _ends_with_answer(field))


def _ends_with_answer(field: str) -> Callable[[Fields], bool]:
    """Tells a conversation with its answer from one that is to be answered."""

    def fits(row: Fields) -> bool:
        turns = row.get(field)
        last = turns[-1] if isinstance(turns, list) and turns else None
        return isinstance(last, dict) and (last.get("role") or last.get("from")) in ("assistant", "gpt")

    return fits


def _demonstration(row: Fields, prompt: Prompt, field: str) -> Demonstration:
    column = row.column(field)
    return row.record(
        Demonstration, {"prompt": prompt, "response": row.text(field)}, {"response": column}, column
    )


DEMONSTRATIONS: tuple[Schema[Demonstration], ...] = (
    _answered("prompt", "response"),
    _answered("prompt", "completion"),
    _instructed("output", "input"),
    _instructed("response", "context"),
    _instructed("instances.0.output", "instances.0.input"),
    _answered("question", "answer"),
    _conversation("messages"),
    _conversation("conversations"),
)
