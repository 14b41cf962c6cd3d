"""The schemas whose rows are prompts, or have one in them."""

from collections.abc import Callable, Iterator

from rlhf_core.records import Prompt
from rlhf_core.sources.conversations import Turns, last_answer, transcript, tree_root
from rlhf_core.sources.fields import Fields
from rlhf_core.sources.mistakes import RefusedRow
from rlhf_core.sources.schemas import Schema, all_are, any_of

NAMED = ("id", "kind")


def _own_prompt(row: Fields) -> Iterator[Prompt]:
    forms = [form for form in ("text", "messages") if row.get(form) is not None]
    if len(forms) != 1:
        raise RefusedRow((row.columns_of("text", "messages"), "one of them is needed, and not both"))
    if forms == ["text"]:
        yield row.prompt("text")
    else:
        yield row.prompt_as("messages", "messages", row.need("messages"))


def _prompt_in(field: str) -> Callable[[Fields], Iterator[Prompt]]:
    def read(row: Fields) -> Iterator[Prompt]:
        yield row.prompt(field)

    return read


def _before_answer(turns: Callable[[Fields, str], Turns], field: str) -> Callable[[Fields], Iterator[Prompt]]:
    def read(row: Fields) -> Iterator[Prompt]:
        yield row.prompt(field, as_json(last_answer(row, field, turns(row, field))[0]))

    return read


def instruction(row: Fields) -> Prompt:
    """An instruction with the text it is about below it, where there is one."""
    about = next((row.text(f) for f in ("instances.0.input", "input", "context") if row.get(f)), "")
    said = row.text("instruction")
    return row.prompt("instruction", f"{said}\n\n{about}" if about.strip() else said)


def _instruction_prompt(row: Fields) -> Iterator[Prompt]:
    yield instruction(row)


def _root_prompt(row: Fields) -> Iterator[Prompt]:
    yield row.prompt("prompt", as_json((tree_root(row, "prompt"),)))


def _first_turn(row: Fields) -> Iterator[Prompt]:
    yield row.prompt_as("messages", "turns.0", [{"role": "user", "content": row.text("turns.0")}])


def as_json(turns: Turns) -> list[object]:
    """Turns as a row would have them."""
    return [turn.to_json() for turn in turns]


PROMPTS: tuple[Schema[Prompt], ...] = (
    Schema("text or messages", (), ("text", "messages", *NAMED), _own_prompt, any_of("text", "messages")),
    Schema(
        "tree of ranked replies", ("message_tree_id", "prompt"), NAMED, _root_prompt, all_are(dict, "prompt")
    ),
    Schema("prompt", ("prompt",), NAMED, _prompt_in("prompt")),
    Schema("conversations/chosen/rejected", ("conversations", "chosen"), NAMED, _prompt_in("conversations")),
    Schema(
        "chosen/rejected transcripts",
        ("chosen", "rejected"),
        NAMED,
        _before_answer(transcript, "chosen"),
        all_are(str, "chosen", "rejected"),
    ),
    Schema(
        "chosen/rejected messages", ("chosen", "rejected"), NAMED, _before_answer(Fields.messages, "chosen")
    ),
    Schema("instruction", ("instruction",), ("input", "context", *NAMED), _instruction_prompt),
    Schema("question", ("question",), NAMED, _prompt_in("question")),
    Schema("turns of a question", ("question_id", "turns"), NAMED, _first_turn, all_are(list, "turns")),
    Schema("input/output_1/output_2", ("input", "output_1", "output_2"), NAMED, _prompt_in("input")),
)
