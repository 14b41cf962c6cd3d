"""The schemas whose rows say which of two completions is better."""

from collections.abc import Callable, Iterator
from itertools import combinations

from rlhf_core.records import Choice, ImportedPreference, Prompt
from rlhf_core.sources.conversations import (
    Reply,
    Turns,
    last_answer,
    same_turns,
    transcript,
    tree_siblings,
)
from rlhf_core.sources.fields import Fields
from rlhf_core.sources.mistakes import RefusedRow
from rlhf_core.sources.prompt_schemas import NAMED, as_json
from rlhf_core.sources.schemas import Schema, all_are

TOLD = ("annotator", "margin", "score_chosen", "score_rejected")
CHOICES = {
    Choice.A: ("a", "1", "model_a", "output_1"),
    Choice.B: ("b", "2", "model_b", "output_2"),
    Choice.TIE: ("tie", "tie (inconsistent)", "tie (bothbad)"),
}
CHOICE_OF = {word: choice for choice, words in CHOICES.items() for word in words}

Read = Callable[[Fields], Iterator[ImportedPreference]]


def _preference(
    row: Fields,
    prompt: Prompt,
    sides: tuple[str, str],
    texts: tuple[str, str],
    choice: Choice,
    margin: object,
) -> ImportedPreference:
    """The judgement of two texts that came from the fields `sides`."""
    annotator = row.get("annotator") or row.get("judge")
    if isinstance(annotator, list):
        annotator = "/".join(map(str, annotator))
    values = {
        "prompt": prompt,
        "completion_a": texts[0],
        "completion_b": texts[1],
        "choice": choice,
        "margin": margin,
        "file": row.file,
        "row": row.number,
    }
    names = {
        "completion_a": row.column(sides[0]),
        "completion_b": row.column(sides[1]),
        "annotator": row.column("annotator"),
        "margin": row.column("margin"),
    }
    told = {} if annotator is None else {"annotator": annotator}
    return row.record(ImportedPreference, values | told, names, row.columns_of(*dict.fromkeys(sides)))


def _margin(row: Fields) -> object:
    """What the row says of it, or the difference of two scores."""
    better, worse = row.get("score_chosen"), row.get("score_rejected")
    if row.get("margin") is None and isinstance(better, int | float) and isinstance(worse, int | float):
        return better - worse
    return row.get("margin")


def _choice(row: Fields, field: str) -> Choice:
    value = row.need(field)
    said = str(value).strip().lower() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if said not in CHOICE_OF:
        known = "; ".join(", ".join(words) for words in CHOICES.values())
        raise RefusedRow(
            (row.column(field), f"says neither a, b nor tie (given: {value!r:.60}; known: {known})")
        )
    return CHOICE_OF[said]


def _side(row: Fields, field: str) -> tuple[Turns, str]:
    """A completion, and the turns that the field has before it: none where it is text or one message."""
    if isinstance(row.need(field), str):
        return (), row.text(field)
    return last_answer(row, field, row.messages(field))


def _better_and_worse(prompt_field: str) -> Read:
    """A prompt with a better and a worse completion: texts, or messages that may repeat the prompt."""

    def read(row: Fields) -> Iterator[ImportedPreference]:
        (before, better), (other, worse) = _side(row, "chosen"), _side(row, "rejected")
        shared = same_turns(row, ("chosen", before), ("rejected", other))
        prompt = row.prompt(prompt_field)
        if shared:
            asked = row.prompt("chosen", as_json(shared))
            if prompt.messages is not None and prompt.messages != asked.messages:
                raise RefusedRow(
                    (row.columns_of(prompt_field, "chosen"), "the messages do not begin with the prompt")
                )
            prompt = asked
        yield _preference(row, prompt, ("chosen", "rejected"), (better, worse), Choice.A, _margin(row))

    return read


def _shared_prefix(turns: Callable[[Fields, str], Turns]) -> Read:
    """Two conversations that are the same up to the assistant's last turn."""

    def read(row: Fields) -> Iterator[ImportedPreference]:
        before, better = last_answer(row, "chosen", turns(row, "chosen"))
        other, worse = last_answer(row, "rejected", turns(row, "rejected"))
        shared = same_turns(row, ("chosen", before), ("rejected", other))
        prompt = row.prompt("chosen", as_json(shared))
        yield _preference(row, prompt, ("chosen", "rejected"), (better, worse), Choice.A, _margin(row))

    return read


def _judged(prompt_field: str, first: str, second: str, choice: str) -> Schema[ImportedPreference]:
    """A prompt, two completions, and which of them is better."""

    def read(row: Fields) -> Iterator[ImportedPreference]:
        texts = row.text(first), row.text(second)
        prompt = row.prompt(prompt_field)
        yield _preference(row, prompt, (first, second), texts, _choice(row, choice), row.get("margin"))

    needs = (prompt_field, first, second, choice)
    return Schema("/".join(needs), needs, ("annotator", "margin", *NAMED), read)


def _two_conversations(row: Fields) -> Iterator[ImportedPreference]:
    """Two models' conversations; where a `turn` was judged, they are read up to it."""
    sides = ("conversation_a", "conversation_b")
    turn = row.get("turn")
    end = 2 * turn if isinstance(turn, int) else None
    (before, a), (other, b) = (last_answer(row, side, row.messages(side)[:end]) for side in sides)
    shared = same_turns(row, (sides[0], before), (sides[1], other))
    prompt = row.prompt(sides[0], as_json(shared))
    yield _preference(row, prompt, sides, (a, b), _choice(row, "winner"), None)


def _ranked_tree(row: Fields) -> Iterator[ImportedPreference]:
    """All pairs of siblings whose ranks and texts differ; the margin is the difference in rank."""
    for siblings in tree_siblings(row, "prompt"):
        for first, second in combinations(siblings, 2):
            if first.rank is None or second.rank is None or first.rank == second.rank:
                continue
            if first.text != second.text:
                better, worse = sorted((first, second), key=_rank)
                yield _tree_pair(row, better, worse)


def _rank(reply: Reply) -> int:
    return reply.rank or 0


def _tree_pair(row: Fields, better: Reply, worse: Reply) -> ImportedPreference:
    prompt = row.prompt("prompt", as_json(better.before))
    margin = float(_rank(worse) - _rank(better))
    return _preference(row, prompt, ("prompt", "prompt"), (better.text, worse.text), Choice.A, margin)


PREFERENCES: tuple[Schema[ImportedPreference], ...] = (
    Schema(
        "tree of ranked replies", ("message_tree_id", "prompt"), NAMED, _ranked_tree, all_are(dict, "prompt")
    ),
    Schema(
        "conversation_a/conversation_b/winner",
        ("conversation_a", "conversation_b", "winner"),
        ("turn", "annotator", *NAMED),
        _two_conversations,
    ),
    _judged("prompt", "completion_a", "completion_b", "choice"),
    _judged("input", "output_1", "output_2", "label"),
    *(
        Schema(
            f"{prompt}/chosen/rejected",
            (prompt, "chosen", "rejected"),
            (*TOLD, *NAMED),
            _better_and_worse(prompt),
        )
        for prompt in ("prompt", "conversations")
    ),
    Schema(
        "chosen/rejected transcripts",
        ("chosen", "rejected"),
        (*TOLD, *NAMED),
        _shared_prefix(transcript),
        all_are(str, "chosen", "rejected"),
    ),
    Schema(
        "chosen/rejected messages",
        ("chosen", "rejected"),
        (*TOLD, *NAMED),
        _shared_prefix(Fields.messages),
        all_are(list, "chosen", "rejected"),
    ),
)
