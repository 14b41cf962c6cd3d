"""Conversations as data sets keep them: transcripts in one text, trees of ranked replies."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_core.records import Message
from rlhf_core.sources.fields import ROLES, Fields
from rlhf_core.sources.mistakes import RefusedRow

# Two empty lines and a name open a turn (Bai et al., 2022).
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}

Turns = tuple[Message, ...]


def transcript(row: Fields, field: str) -> Turns:
    """The turns of a text like "\\n\\nHuman: ... \\n\\nAssistant: ...", white space around each left out."""
    head, *parts = TURN.split("\n\n" + row.text(field).strip())
    if head or not parts:
        raise RefusedRow(
            (row.column(field), "not a transcript: no `Human:` or `Assistant:` begins its first turn")
        )
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message(role=SPEAKERS[speaker], content=said.strip()) for speaker, said in spoken)


def last_answer(row: Fields, field: str, turns: Turns) -> tuple[Turns, str]:
    """What was said before, and the assistant's last turn."""
    if not turns or turns[-1].role != "assistant":
        raise RefusedRow(
            (row.column(field), "does not end with the assistant's turn: there is no completion")
        )
    return turns[:-1], turns[-1].content


def same_turns(row: Fields, first: tuple[str, Turns], second: tuple[str, Turns]) -> Turns:
    """The turns that two fields share; raises where they are not the same."""
    (field, turns), (other, others) = first, second
    if turns != others:
        pairs = enumerate(zip(turns, others, strict=False), start=1)
        at = next((number for number, (a, b) in pairs if a != b), min(len(turns), len(others)) + 1)
        raise RefusedRow(
            (
                row.columns_of(field, other),
                f"their turns differ from turn {at} on: they answer different prompts",
            )
        )
    return turns


@dataclass(frozen=True)
class Reply:
    """A node of a tree: a reply with all that was said before it."""

    before: Turns
    text: str
    rank: int | None
    """0 is the best of its siblings."""


def tree_siblings(row: Fields, field: str) -> Iterator[Sequence[Reply]]:
    """The assistant's replies to each user's turn of a tree, in its order; deleted ones are left out."""
    column = row.column(field)
    waiting: list[tuple[object, Turns]] = [(row.need(field), ())]
    while waiting:
        node, before = waiting.pop()
        said, replies = _node(column, node)
        path = (*before, said)
        found = [(*_node(column, reply), reply) for reply in replies]
        if said.role == "user":
            yield [
                Reply(path, reply.content, _rank(node))
                for reply, _, node in found
                if reply.role == "assistant"
            ]
        waiting.extend((reply, path) for *_, reply in reversed(found))


def tree_root(row: Fields, field: str) -> Message:
    """What the first user of a tree said."""
    return _node(row.column(field), row.need(field))[0]


def _node(column: str, node: object) -> tuple[Message, list[object]]:
    """A node's message, and its replies that were not deleted."""
    if not isinstance(node, dict):
        raise RefusedRow((column, "not a tree: a reply must have `text`, `role` and `replies`"))
    text, role, replies = node.get("text"), node.get("role"), node.get("replies") or []
    if not isinstance(text, str) or role not in ("prompter", "assistant") or not isinstance(replies, list):
        raise RefusedRow(
            (column, "not a tree: a reply must have `text`, `role` (prompter, assistant) and `replies`")
        )
    kept = [reply for reply in replies if not (isinstance(reply, dict) and reply.get("deleted"))]
    return Message(role=ROLES.get(role, role), content=text), kept


def _rank(node: object) -> int | None:
    rank = node.get("rank") if isinstance(node, dict) else None
    return rank if isinstance(rank, int) else None
