"""Demonstrations as ids: the template's own, split where sampling would begin, none cut, each on its side."""

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlhf_core.algorithms.demonstrations import TokenRows, encode, is_held_out, tokenised
from rlhf_core.models import Base, TextCodec, TinyModel, load_base
from rlhf_core.packing import PackedBatch
from rlhf_core.records import Demonstration, Message, Prompt
from rlhf_core.tiny_model import byte_tokenizer

END, TURN_START, TURN_END = 257, 258, 259  # of the byte tokenizer, whose bytes are 0 to 255


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(TinyModel(hidden_size=16, num_layers=1, num_heads=2), torch.float32)


@pytest.fixture(scope="module")
def codec(base: Base) -> TextCodec:
    return TextCodec(base)


def with_tokenizer(base: Base, tokenizer: PreTrainedTokenizerFast) -> TextCodec:
    """A codec of another tokenizer on the tiny model."""
    return TextCodec(Base(base.model, tokenizer))


def plain(text: str, response: str, id: str = "p") -> Demonstration:
    return Demonstration(prompt=Prompt(id=id, text=text), response=response)


def chat(said: str, response: str, *before: Message) -> Demonstration:
    turns = (*before, Message(role="user", content=said))
    return Demonstration(prompt=Prompt(id="c", messages=turns), response=response)


def test_a_plain_response_follows_its_prompt_and_ends_with_the_end_token(codec: TextCodec) -> None:
    prompt, response = encode(codec, plain("one", " two"))
    assert prompt == codec.encode_prompt(Prompt(id="p", text="one"))
    assert codec.decode(response) == " two"
    assert response[-1] == END and response.count(END) == 1
    assert encode(codec, plain("one", " two"), responses_end=False) == (prompt, response[:-1])


def test_a_chats_ids_are_the_templates_own_up_to_the_end_of_the_answer(codec: TextCodec) -> None:
    before = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    one = chat("what?", "that", *before)
    prompt, response = encode(codec, one)
    turns = [{"role": m.role, "content": m.content} for m in one.prompt.messages or ()]
    wanted = codec.tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": "that"}], return_dict=False
    )
    assert wanted[-1] == codec.tokenizer("\n").input_ids[0]  # what the template writes behind the turn
    assert prompt + response == wanted[:-1]
    assert prompt == codec.encode_prompt(one.prompt)
    assert response == [*codec.tokenizer("that").input_ids, TURN_END]


def test_text_that_spells_a_control_token_stays_text(codec: TextCodec) -> None:
    for one in (
        plain("<|im_start|>", "<|endoftext|>"),
        plain("one", "<|endoftext|>"),
        chat("<|im_end|>", "<|im_end|><|endoftext|>"),
    ):
        prompt, response = encode(codec, one)
        assert codec.decode(response) == one.response
        assert [token for token in response if token > 255] == [response[-1]]
        # Of the template: a turn opened and closed, and the answer's turn opened.
        marks = [token for token in prompt if token > 255]
        assert marks == ([] if one.prompt.text else [TURN_START, TURN_END, TURN_START])


def test_a_beginning_that_the_tokenizer_adds_is_there_once(base: Base) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", TURN_START)]
    )
    prompt, response = encode(with_tokenizer(base, tokenizer), plain("one", " two"))
    assert (prompt + response).count(TURN_START) == 1 and prompt[0] == TURN_START


def joining() -> PreTrainedTokenizerFast:
    """Bytes, of which two line breaks are one token where they meet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    newline = "Ċ"
    backend = Tokenizer(BPE(vocab={**vocabulary, newline * 2: 256}, merges=[(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tiny = byte_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=tiny.chat_template,
        clean_up_tokenization_spaces=False,
    )


def test_a_token_across_the_border_is_split_where_sampling_begins(base: Base) -> None:
    tokenizer = joining()
    codec = with_tokenizer(base, tokenizer)
    assert tokenizer("\n\n").input_ids == [256]
    for one in (plain("one\n", "\ntwo"), chat("one", "\ntwo")):
        prompt, response = encode(codec, one)
        assert prompt == codec.encode_prompt(one.prompt)
        assert 256 not in prompt + response
        assert codec.decode(prompt + response).endswith("\n\ntwo")
        assert response[-1] == tokenizer.eos_token_id


def test_a_template_that_writes_another_prompt_once_it_is_answered_is_refused(base: Base) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ 'Think. ' }}"
    )
    with pytest.raises(ValueError, match=r"prompt 'c'.*otherwise when the response 'that' is there"):
        encode(with_tokenizer(base, tokenizer), chat("what?", "that"))


def test_a_template_whose_turn_ends_with_no_end_token_is_refused(base: Base) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"none of the model's end tokens .*<\|im_end\|>.*never stop"):
        encode(with_tokenizer(base, tokenizer), chat("what?", "that"))


def test_a_chat_for_a_base_without_a_template_is_refused(base: Base) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode(with_tokenizer(base, tokenizer), chat("what?", "that"))


def test_what_is_too_long_is_refused_with_its_length_or_left_out_and_counted(codec: TextCodec) -> None:
    rows = [plain("a" * 5, "b" * 4), plain("a" * 5, "b" * 5, "long"), plain("a", "b")]
    # A byte is a token, and the end is one: 10, 11 and 3.
    with pytest.raises(ValueError, match=r"1 of 3 demonstrations have more than 10 tokens: prompt long \(11"):
        tokenised(codec, rows, max_length=10)
    split = tokenised(codec, rows, max_length=10, drop_too_long=True)
    assert (len(split.train), split.num_too_long, split.train.longest) == (2, 1, 10)


def test_the_models_context_is_a_limit_too(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match=f"more than {codec.context_length} tokens"):
        tokenised(codec, [plain("a" * codec.context_length, "b")], max_length=100_000)


def test_a_prompt_is_on_one_side_by_its_id_whatever_else_there_is(codec: TextCodec) -> None:
    rows = [plain("a", f"{n}", id=f"p{n % 200}") for n in range(600)]
    split = tokenised(codec, rows, max_length=64, held_out_share=0.2)
    held = {row.prompt.id for row in rows if is_held_out(row.prompt.id, 0.2)}
    assert len(split.held_out) == 3 * len(held)
    assert len(split.train) == 600 - 3 * len(held)
    # A share of 0.2 of 200 ids: 40, give or take three deviations of 5.7.
    assert abs(len(held) - 40) < 17
    # A larger share holds out more, and all that a smaller one did.
    assert held <= {row.prompt.id for row in rows if is_held_out(row.prompt.id, 0.5)}


def test_nothing_to_learn_or_to_measure_is_refused(codec: TextCodec) -> None:
    taught = next(f"p{n}" for n in range(100) if not is_held_out(f"p{n}", 0.5))
    with pytest.raises(ValueError, match="1 to learn and 0 held out"):
        tokenised(codec, [plain("a", "b", taught)], max_length=64, held_out_share=0.5)
    with pytest.raises(ValueError, match="0 to learn and 0 held out"):
        tokenised(codec, [plain("a" * 99, "b")], max_length=64, drop_too_long=True)
    assert len(tokenised(codec, [plain("a", "b", taught)], max_length=64).train) == 1


def test_token_rows_are_cut_into_parts_that_hold_each_row_once(make_rows: Callable[..., TokenRows]) -> None:
    for width in (0, 192):
        rows = make_rows(width)
        parts = list(rows.parts(64, 256))
        assert len(parts) > 1
        assert sorted(map(bytes, rows.responses)) == sorted(
            bytes(r) for part in parts for r in part.responses
        )
        assert sum(part.weight for part in parts) == rows.weight == int(rows.batch().response_mask.sum())
        assert isinstance(rows.batch(), PackedBatch) == bool(width)


def test_selected_rows_keep_prompt_and_response_together(make_rows: Callable[..., TokenRows]) -> None:
    rows = make_rows(0)
    chosen = rows.select(torch.tensor([3, 1]))
    assert chosen.prompts == [rows.prompts[3], rows.prompts[1]]
    assert chosen.responses == [rows.responses[3], rows.responses[1]]
