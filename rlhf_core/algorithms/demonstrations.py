"""Demonstrations as token rows: the ids are the template's own, and a row keeps where its response begins."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import TextBatch, collate
from rlhf_core.models import TextCodec
from rlhf_core.packing import PackedBatch
from rlhf_core.records import Demonstration

NUM_SHOWN = 3
ROWS_AT_ONCE = 256


@dataclass
class TokenRows:
    """Demonstrations as ids, four bytes a token; a batch is made of those that meet the model together."""

    pad_id: int
    row_width: int = 0
    """Tokens of a packed row; 0 for each demonstration by itself."""
    device: torch.device | str = "cpu"
    prompts: list["array[int]"] = field(default_factory=list)
    responses: list["array[int]"] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def weight(self) -> int:
        """Response tokens: what a loss over the rows is divided by."""
        return sum(map(len, self.responses))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True))

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """One more row."""
        self.prompts.append(array("i", prompt))
        self.responses.append(array("i", response))

    def select(self, rows: Tensor) -> "TokenRows":
        """The rows named, in that order."""
        chosen = rows.tolist()
        prompts, responses = [self.prompts[row] for row in chosen], [self.responses[row] for row in chosen]
        return TokenRows(self.pad_id, self.row_width, self.device, prompts, responses)

    def batch(self) -> TextBatch:
        """All rows as one batch on the device."""
        plain = collate(self.prompts, self.responses, self.pad_id, self.device)
        return PackedBatch(**vars(plain), row_width=self.row_width) if self.row_width else plain

    def parts(self, bucket: int, tokens: int) -> Iterator["TokenRows"]:
        """The rows in pieces that fit a forward pass."""
        for start in range(0, len(self), ROWS_AT_ONCE):
            some = self.select(torch.arange(start, min(start + ROWS_AT_ONCE, len(self))))
            for rows, _ in some.batch().micro_batches(bucket, tokens):
                yield some.select(rows)


@dataclass(frozen=True)
class Split:
    """Token rows for training and for the held-out loss."""

    train: TokenRows
    held_out: TokenRows
    num_too_long: int = 0
    """Demonstrations that were left out for their length."""


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether demonstrations of this prompt are measured on and not learned: by the prompt's id alone."""
    return derive_seed("held-out demonstrations", prompt_id) / 2**63 < share


def tokenised(
    codec: TextCodec,
    demonstrations: Iterable[Demonstration],
    *,
    max_length: int,
    responses_end: bool = True,
    drop_too_long: bool = False,
    held_out_share: float = 0.0,
) -> Split:
    """All demonstrations as token rows; raises for those that are too long, unless they may be dropped."""
    limit = min(max_length, codec.context_length)
    train, held_out = TokenRows(codec.pad_id), TokenRows(codec.pad_id)
    too_long: list[str] = []
    for one in demonstrations:
        prompt, response = encode(codec, one, responses_end)
        length = len(prompt) + len(response)
        if length > limit:
            too_long.append(f"prompt {one.prompt.id} ({length} tokens)")
        elif is_held_out(one.prompt.id, held_out_share):
            held_out.add(prompt, response)
        else:
            train.add(prompt, response)
    num_all = len(train) + len(held_out) + len(too_long)
    if too_long and not drop_too_long:
        raise ValueError(
            f"{len(too_long)} of {num_all} demonstrations have more than {limit} tokens: "
            f"{', '.join(too_long[:NUM_SHOWN])}. Cut, they would teach to stop in the middle. Raise "
            f"max_length (the model's context is {codec.context_length}), shorten them, or set drop_too_long."
        )
    if not train or (held_out_share and not held_out):
        raise ValueError(
            f"{num_all} demonstrations, {len(too_long)} of them too long, split into {len(train)} to learn "
            f"and {len(held_out)} held out: both are needed. Give more, or change held_out_share "
            f"({held_out_share}; 0 measures none)."
        )
    return Split(train, held_out, len(too_long))


def encode(
    codec: TextCodec, demonstration: Demonstration, responses_end: bool = True
) -> tuple[list[int], list[int]]:
    """The ids of prompt and response: together the template's own, the prompt's those that are sampled from.

    A chat's response goes up to and including the end of its turn, whatever the template writes behind that.
    A plain one is followed by the tokenizer's end token if responses end.
    """
    prompt = codec.encode_prompt(demonstration.prompt)
    whole = _whole(codec, demonstration)
    apart = codec.tokenizer(
        demonstration.response, split_special_tokens=True, add_special_tokens=False
    ).input_ids
    if demonstration.prompt.messages is not None:
        whole = _to_end_of_turn(codec, demonstration, prompt, whole)
        apart = [*apart, whole[-1]]
    if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
        response = whole[len(prompt) :]
    elif _spelled(codec, [*prompt, *apart]) == _spelled(codec, whole):
        # The tokenizer joins the prompt's last letters to the first of the response, as it cannot when
        # sampling: there the prompt has its own ids.
        response = list(apart)
    else:
        raise ValueError(
            f"the demonstration of prompt {demonstration.prompt.id!r}: the base model's template writes the "
            f"prompt otherwise when the response {demonstration.response[:40]!r} is there than when it is to "
            "come, so that nothing would be learned of what is sampled. Leave it out, or use another base "
            "model."
        )
    plain_end = demonstration.prompt.messages is None and responses_end
    return prompt, [*response, _end_id(codec)] if plain_end else response


def _whole(codec: TextCodec, demonstration: Demonstration) -> list[int]:
    """Prompt and response in one text, as the tokenizer or the template has them."""
    prompt, response = demonstration.prompt, demonstration.response
    if prompt.messages is None:
        joined = f"{prompt.text}{response}"
        return list(codec.tokenizer(joined, split_special_tokens=True).input_ids)
    turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
    ids = codec.tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": response}],
        add_generation_prompt=False,
        sanitize_control_tokens=True,
        return_dict=False,
    )
    return cast(list[int], ids)


def _to_end_of_turn(
    codec: TextCodec, demonstration: Demonstration, prompt: Sequence[int], whole: list[int]
) -> list[int]:
    """`whole` up to the first end token behind what it shares with the prompt."""
    shared = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if len({*pair}) > 1), None)
    start = min(len(prompt), len(whole)) if shared is None else shared
    end = next((at for at in range(start, len(whole)) if whole[at] in codec.eos_ids), None)
    if end is None:
        names = ", ".join(map(str, codec.tokenizer.convert_ids_to_tokens(list(codec.eos_ids))))
        raise ValueError(
            f"the demonstration of prompt {demonstration.prompt.id!r}: the chat template ends an answer with "
            f"none of the model's end tokens ({names}): the tuned model would never stop. Name the token "
            "that ends a turn as eos_token_id in the model's generation_config.json."
        )
    return whole[: end + 1]


def _end_id(codec: TextCodec) -> int:
    """The token that ends a plain text: the tokenizer's own, else the first that ends a completion."""
    own: int | None = codec.tokenizer.eos_token_id
    return codec.eos_ids[0] if own is None else own


def _spelled(codec: TextCodec, ids: Sequence[int]) -> str:
    """The text of ids, control tokens included."""
    text = codec.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return cast(str, text)
