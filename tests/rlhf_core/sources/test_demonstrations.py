import pytest

from rlhf_core.sources import InvalidSource, demonstrations, kind_of

TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So"}]


@pytest.mark.parametrize(
    ("row", "schema", "prompt"),
    [
        ({"prompt": "?", "response": "So"}, "prompt/response", "?"),
        ({"prompt": "?", "completion": "So"}, "prompt/completion", "?"),
        ({"instruction": "Add", "input": "1", "output": "So"}, "instruction/output", "Add\n\n1"),
        ({"instruction": "Add", "context": "", "response": "So"}, "instruction/response", "Add"),
        (
            {"instruction": "Add", "instances": [{"input": "1", "output": "So"}]},
            "instruction/instances.0.output",
            "Add\n\n1",
        ),
        ({"question": "?", "answer": "So"}, "question/answer", "?"),
        ({"messages": TALK}, "messages", "user: ?"),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "So"}]},
            "conversations",
            "user: ?",
        ),
    ],
)
def test_the_common_schemas_are_recognised(jsonl, row: dict[str, object], schema: str, prompt: str) -> None:
    source = jsonl(row)
    reading = demonstrations(source)
    assert [(one.prompt.shown, one.response) for one in reading] == [(prompt, "So")]
    assert reading.recognised == {"rows.jsonl": schema}
    assert kind_of(source) == "demonstrations"


def test_a_mapping_finds_the_fields(jsonl) -> None:
    source = jsonl({"chosen": "So", "prompt": "?"}, columns={"response": "chosen"}, plain_text="message")
    assert [(one.prompt.shown, one.response) for one in demonstrations(source)] == [("user: ?", "So")]


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        ({"prompt": "?", "response": " "}, "response: empty: there is nothing to learn from"),
        ({"prompt": " ", "response": "So"}, "prompt: prompt 'without an id' is empty"),
        ({"prompt": "?", "response": None}, "response: missing; the row has prompt, response"),
        ({"prompt": "?", "response": 5}, "response: must be text (given: 5)"),
        ({"prompt": "?", "response": "\ud800"}, "response: a lone surrogate, half a character, at 1"),
    ],
)
def test_a_bad_row_is_named_by_row_and_column(jsonl, row: dict[str, object], mistake: str) -> None:
    reading = demonstrations(jsonl({"prompt": "?", "response": "So"}, row, max_bad_share=0.5))
    assert len(list(reading)) == 1
    assert str(reading.mistakes[0]).startswith(f"rows.jsonl, row 2: {mistake}")


def test_a_conversation_must_end_with_the_assistant(jsonl) -> None:
    reading = demonstrations(jsonl({"messages": TALK}, {"messages": TALK[:1]}, max_bad_share=0.5))
    assert [one.response for one in reading] == ["So"]
    assert str(reading.mistakes[0]).startswith("rows.jsonl, row 2: messages: does not end with the assistant")
    questions = jsonl({"messages": TALK[:1]})
    assert kind_of(questions) == "prompts"
    with pytest.raises(InvalidSource, match="no demonstrations in the columns messages"):
        list(demonstrations(questions))


def test_prompts_alone_are_no_demonstrations(jsonl) -> None:
    source = jsonl({"text": "Once"})
    with pytest.raises(InvalidSource, match="no demonstrations in the columns text"):
        list(demonstrations(source))
    assert kind_of(source) == "prompts"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("dolly-hhrlhf", 1000),
        ("self-instruct", 427),
        ("gsm8k/test.jsonl", 1319),
    ],
)
def test_the_shared_data_sets_have_their_demonstrations(shared, path: str, number: int) -> None:
    reading = demonstrations(shared(path))
    assert (sum(1 for _ in reading), reading.num_bad) == (number, 0)
