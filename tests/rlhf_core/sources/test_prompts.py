from pathlib import Path

import pytest

from rlhf_core.records import Message, Prompt
from rlhf_core.settings import InvalidSettings, Settings, parse_settings
from rlhf_core.sources import FileSource, InvalidSource, PackagedPrompts, PromptSource, prompts, read_prompts

ASK = '{"role": "user", "content": "?"}'


def refusal(source: FileSource) -> list[str]:
    """The mistakes in the message that a source is refused with, without the file's name."""
    with pytest.raises(InvalidSource) as error:
        read_prompts(source)
    head, *mistakes = str(error.value).splitlines()
    assert head.startswith(f"{source.path}: ") and "rows refused, and 0.00% may be: mend them" in head
    return [mistake.removeprefix("rows.jsonl, ") for mistake in mistakes]


def user(*said: str) -> tuple[Message, ...]:
    return tuple(Message(role="user", content=text) for text in said)


def test_texts_and_messages_are_read_in_order(jsonl) -> None:
    source = jsonl(
        '{"id": "b", "kind": "story", "text": " Once", "extra": [1]}',
        "",
        '{"id": "a", "messages": [{"role": "user", "content": "Why\\u2028?"}], "text": null}',
    )
    assert read_prompts(source) == [
        Prompt(id="b", kind="story", text=" Once"),
        Prompt(id="a", messages=user("Why\u2028?")),
    ]


def test_a_last_line_without_a_newline_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}')
    assert [prompt.id for prompt in read_prompts(FileSource(path=str(tmp_path / "p.jsonl")))] == ["a", "b"]


def test_mapped_columns_take_the_place_of_those_with_our_names(jsonl) -> None:
    row = '{"q": "Once", "n": "one", "topic": "story", "id": 7, "text": 8, "messages": 9}'
    columns = {"text": "q", "messages": "chat", "id": "n", "kind": "topic"}
    assert read_prompts(jsonl(row, columns=columns)) == [Prompt(id="one", kind="story", text="Once")]
    broken = jsonl('{"q": 1, "n": "one"}', columns={"text": "q", "id": "n"})
    assert refusal(broken) == ["row 1: q: Input should be a valid string (given: 1)"]


def test_a_mapped_column_can_lie_inside_another(jsonl) -> None:
    columns = {"prompt": "turns.1.said"}
    rows = [{"turns": [{"said": "a"}, {"said": "b"}]}, {"turns": []}]
    source = jsonl(*rows, columns=columns, max_bad_share=0.5)
    assert [prompt.text for prompt in read_prompts(source)] == ["b"]


def test_a_row_without_the_mapped_column_is_named_with_what_it_has(jsonl) -> None:
    source = jsonl('{"q": "Once"}', '{"question": "Once", "n": 1}', columns={"prompt": "q"})
    assert refusal(source) == ["row 2: q: missing; the row has question, n"]


@pytest.mark.parametrize("columns", [{"promt": "text"}, {"prompt": "q"}, {"response": "text"}])
def test_a_mapping_that_fits_no_schema_is_refused_with_the_schemas(jsonl, columns: dict[str, str]) -> None:
    mistakes = refusal(jsonl('{"text": "Once"}', columns=columns))
    assert mistakes[0].startswith("row 1: no prompts in the columns text")
    assert mistakes[1].startswith("Schemas that have prompts: text or messages; ")


def test_plain_text_is_an_opening_unless_it_is_said_to_be_a_message(jsonl) -> None:
    rows = ['{"text": "Hi"}', '"Why?"', '{"messages": [' + ASK + "]}"]
    assert [prompt.text for prompt in read_prompts(jsonl(*rows))] == ["Hi", "Why?", None]
    asked = read_prompts(jsonl(*rows, plain_text="message"))
    assert [prompt.messages for prompt in asked] == [user("Hi"), user("Why?"), user("?")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Once"}, Prompt(id="x", text="Once")),
        ({"prompt": [{"role": "user", "content": "?"}]}, Prompt(id="x", messages=user("?"))),
        ({"prompt": [{"from": "human", "value": "?"}]}, Prompt(id="x", messages=user("?"))),
        ({"instruction": "Add", "input": "1 2"}, Prompt(id="x", text="Add\n\n1 2")),
        ({"instruction": "Add", "input": ""}, Prompt(id="x", text="Add")),
        ({"instruction": "Add", "instances": [{"input": "1"}]}, Prompt(id="x", text="Add\n\n1")),
        ({"question": "Why?", "answer": "So"}, Prompt(id="x", text="Why?")),
        ({"question_id": 1, "turns": ["Why?", "How?"]}, Prompt(id="x", messages=user("Why?"))),
        (
            {"chosen": "\n\nHuman: Why?\n\nAssistant: So", "rejected": "\n\nHuman: Why?\n\nAssistant:"},
            Prompt(id="x", messages=user("Why?")),
        ),
        (
            {"message_tree_id": "t", "prompt": {"text": "Why?", "role": "prompter", "replies": []}},
            Prompt(id="x", messages=user("Why?")),
        ),
    ],
)
def test_the_common_schemas_have_prompts(jsonl, row: dict[str, object], expected: Prompt) -> None:
    assert read_prompts(jsonl(row | {"id": "x"})) == [expected]


@pytest.mark.parametrize("name", ["openings", "chats"])
def test_the_packaged_prompts_can_be_read(name: str) -> None:
    found = read_prompts(PackagedPrompts(name=name))
    assert len({prompt.id for prompt in found}) == len(found) > 50
    assert {prompt.text is None for prompt in found} == {name == "chats"}


def test_a_source_is_told_by_its_type() -> None:
    class Run(Settings):
        prompts: PromptSource = PackagedPrompts()
        """Where prompts come from."""

    assert parse_settings(Run, {"prompts": {"type": "file", "path": "p.jsonl"}}).prompts == FileSource(
        path="p.jsonl"
    )
    with pytest.raises(InvalidSettings, match=r"prompts\.nam: unknown key; did you mean `name`"):
        parse_settings(Run, {"prompts": {"type": "packaged", "nam": "chats"}})
    with pytest.raises(InvalidSettings, match=r"prompts\.path: Field required"):
        parse_settings(Run, {"prompts": {"type": "file"}})


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("{", "not JSON from character 2 on: Expecting property name enclosed in double quotes"),
        ('{"text": "a"} {}', "not JSON from character 15 on: Extra data"),
        pytest.param("[" * 100_000, "not JSON: maximum recursion depth exceeded", id="deep"),
        pytest.param('{"text": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit", id="long number"),
        ("[1, 2]", "not a JSON object: [1, 2]"),
        (b'{"text": "caf\xe9"}', "not UTF-8 from byte 14 on"),
        ("{}", "text, messages: one of them is needed, and not both"),
        ('{"text": "a", "messages": []}', "text, messages: one of them is needed, and not both"),
        ('{"text": ""}', "text: prompt 'without an id' is empty"),
        ('{"id": "x", "text": " "}', "text: prompt 'x' is empty"),
        ('{"id": "x", "messages": []}', "messages: prompt 'x' is empty"),
        ('{"text": 5}', "text: Input should be a valid string (given: 5)"),
        ('{"text": NaN}', "text: Input should be a valid string (given: nan)"),
        (
            '{"id": 5, "kind": 6, "text": "a"}',
            "id: Input should be a valid string (given: 5)\n"
            "row 3: kind: Input should be a valid string (given: 6)",
        ),
        ('{"id": "", "text": "a"}', "id: String should have at least 1 character"),
        ('{"kind": [], "text": "a"}', "kind: Input should be a valid string (given: [])"),
        ('{"text": "a\\u0000"}', "text: a null byte at character 2"),
        ('{"id": "\\u0000", "text": "a"}', "id: a null byte at character 1"),
        ('{"kind": "\\udc00", "text": "a"}', "kind: a lone surrogate, half a character, at 1"),
        ('{"text": "ab\\ud800"}', "text: a lone surrogate, half a character, at 3"),
        ('{"messages": "hi"}', "messages: Input should be a valid tuple (given: 'hi')"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: Field required"),
        ('{"messages": [{"role": "", "content": "a"}]}', "messages.0.role: String should have at least 1"),
        ('{"messages": [' + ASK + ', {"role": "a", "content": "b", "c": 1}]}', "messages.1.c: Extra inputs"),
        ('{"messages": [{"role": "a", "content": "\\u0000"}]}', "messages.0.content: a null byte"),
        (
            '{"messages": [{"role": "\\ud800", "content": "a"}]}',
            "messages.0.role: Input should be a valid string",
        ),
        (
            '{"messages": [' + ASK + ', {"role": "assistant", "content": "b"}]}',
            "messages: prompt 'without an id' ends",
        ),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(jsonl, line: str | bytes, mistake: str) -> None:
    message = "\n".join(refusal(jsonl('{"id": "good", "text": "Once"}', "", line)))
    assert message.startswith(f"row 3: {mistake}")


def test_a_surrogate_pair_is_a_character(jsonl) -> None:
    assert read_prompts(jsonl('{"id": "x", "text": "\\ud83d\\ude00"}'))[0].text == "😀"


def test_a_long_value_is_not_repeated_whole(jsonl) -> None:
    (message,) = refusal(jsonl('{"id": "x", "messages": "' + "long " * 10_000 + '"}'))
    assert len(message) < 200


def test_ten_bad_rows_are_listed_and_the_rest_counted(jsonl) -> None:
    good = '{"text": "Once"}'
    assert refusal(jsonl(good, *["{}"] * 10))[-1].startswith("row 11:")
    mistakes = refusal(jsonl(good, *["{}"] * 13))
    assert len(mistakes) == 11
    assert mistakes[9].startswith("row 11:") and mistakes[10] == "and 3 more rows"


def test_an_id_given_twice_is_refused_with_both_rows(jsonl) -> None:
    source = jsonl('{"id": "a", "text": "x"}', "{", '{"id": "a", "text": "y"}', '{"id": "a", "text": "z"}')
    assert refusal(source)[1:] == [
        "row 3: id: 'a' is already the id of row 1",
        "row 4: id: 'a' is already the id of row 1",
    ]


def test_an_id_of_another_file_of_a_folder_is_refused_with_the_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": "a", "text": "x"}\n')
    with pytest.raises(
        InvalidSource, match=r"b\.jsonl, row 1: id: 'a' is already the id of row 1 of a\.jsonl"
    ):
        read_prompts(FileSource(path=str(tmp_path)))


def test_rows_without_an_id_get_one_from_their_content(jsonl) -> None:
    rows = ['{"text": "Once"}', '{"messages": [{"content": "Once", "role": "user"}], "kind": "k"}']
    # printf '"Once"' | sha256sum | cut -c1-16
    # printf '[{"content":"Once","role":"user"}]' | sha256sum | cut -c1-16
    expected = ["1372a3c27b34acef", "78c93a003505c345"]
    assert [prompt.id for prompt in read_prompts(jsonl(*rows))] == expected
    assert [prompt.id for prompt in read_prompts(jsonl(*reversed(rows)))] == expected[::-1]


def test_equal_contents_without_ids_are_refused_and_the_reason_said(jsonl) -> None:
    source = jsonl('{"text": "Once", "kind": "a"}', '{"kind": "b", "text": "Once"}')
    assert refusal(source) == [
        "row 2: id: '1372a3c27b34acef', made from its content, is already the id of row 1"
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(InvalidSource, match=r"p\.jsonl: no prompts in its 0 rows"):
        read_prompts(FileSource(path=str(tmp_path / "p.jsonl")))


def test_bad_rows_within_the_share_are_left_out_and_kept_count_of(jsonl) -> None:
    source = jsonl('{"text": "a"}', "{", '{"text": "b"}', '{"text": ""}', max_bad_share=0.5)
    reading = prompts(source)
    assert [prompt.text for prompt in reading] == ["a", "b"]
    assert (reading.num_rows, reading.num_bad, reading.num_records) == (4, 2, 2)
    assert [mistake.row for mistake in reading.mistakes] == [2, 4]
    assert reading.recognised == {"rows.jsonl": "text or messages"}
    assert list(reading) == read_prompts(source)  # read anew, with new counts


def test_more_bad_rows_than_the_share_refuse_the_source(jsonl) -> None:
    source = jsonl('{"text": "a"}', "{", "{", max_bad_share=0.5)
    with pytest.raises(InvalidSource, match=r"2 of 3 rows refused, and 50\.00% may be"):
        read_prompts(source)


def test_a_long_source_that_is_wrong_throughout_is_not_read_to_its_end(jsonl) -> None:
    with pytest.raises(InvalidSource, match=r"1000 of 1001 rows refused") as error:
        read_prompts(jsonl('{"text": "a"}', *["{"] * 5000))
    assert str(error.value).endswith("and 990 more rows")


def test_the_schema_of_a_files_first_row_is_held_for_all_of_it(jsonl) -> None:
    source = jsonl(
        '{"prompt": "a"}', '{"question": "b"}', '{"prompt": "c", "question": "d"}', max_bad_share=0.4
    )
    reading = prompts(source)
    assert [prompt.text for prompt in reading] == ["a", "c"]
    assert str(reading.mistakes[0]) == "rows.jsonl, row 2: prompt: missing; the row has question"


@pytest.mark.parametrize(
    ("path", "number", "settings"),
    [
        ("gsm8k/test.jsonl", 1319, {}),
        ("oasst/prompt_lottery_en_250_text.jsonl", 250, {}),
        ("oasst/en_100_tree.jsonl", 100, {}),
        ("self-instruct/user_oriented_instructions.jsonl", 252, {}),
        ("mt-bench/question.jsonl", 80, {}),
        ("dolly-hhrlhf", 999, {"max_bad_share": 0.01}),  # one prompt comes twice
        ("simplesafetytests", 100, {"columns": {"prompt": "prompts_final"}}),
    ],
)
def test_the_shared_data_sets_have_their_prompts(shared, path: str, number: int, settings) -> None:
    assert len(read_prompts(shared(path, **settings))) == number
