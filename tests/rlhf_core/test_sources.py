import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhf_core.records import Completion, Measurement, Message, Prompt, StopReason, compare
from rlhf_core.settings import InvalidSettings, Settings, parse_settings
from rlhf_core.sources import (
    InvalidSource,
    PackagedPrompts,
    PromptFile,
    PromptSource,
    read_prompts,
    read_rows,
    write_rows,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
ASK = '{"role": "user", "content": "?"}'


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., PromptFile]:
    """Writes lines into a file and gives its settings."""

    def write(*lines: str | bytes, **fields: str) -> PromptFile:
        data = b"".join(line.encode() + b"\n" if isinstance(line, str) else line + b"\n" for line in lines)
        (tmp_path / "prompts.jsonl").write_bytes(data)
        return PromptFile(path=str(tmp_path / "prompts.jsonl"), **fields)

    return write


def refusal(source: PromptFile) -> list[str]:
    """The lines of the message that a source is refused with."""
    with pytest.raises(InvalidSource) as error:
        read_prompts(source)
    head, *mistakes = str(error.value).splitlines()
    assert head == f"{source.path}: refused rows"
    return mistakes


def test_texts_and_messages_are_read_in_order(jsonl) -> None:
    source = jsonl(
        '{"id": "b", "kind": "story", "text": " Once", "extra": [1]}',
        "",
        '{"id": "a", "messages": [{"role": "user", "content": "Why\\u2028?"}], "text": null}',
    )
    assert read_prompts(source) == [
        Prompt(id="b", kind="story", text=" Once"),
        Prompt(id="a", messages=(Message(role="user", content="Why\u2028?"),)),
    ]


def test_a_last_line_without_a_newline_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}')
    assert [prompt.id for prompt in read_prompts(PromptFile(path=str(tmp_path / "p.jsonl")))] == ["a", "b"]


def test_fields_are_found_under_their_names_in_the_file(jsonl) -> None:
    row = '{"q": "Once", "n": "one", "topic": "story", "id": 7, "text": 8, "messages": 9}'
    source = jsonl(row, text_field="q", messages_field="chat", id_field="n", kind_field="topic")
    assert read_prompts(source) == [Prompt(id="one", kind="story", text="Once")]
    broken = jsonl('{"q": 1, "n": "one"}', text_field="q", id_field="n")
    assert refusal(broken) == ["line 1: q: Input should be a valid string (given: 1)"]


@pytest.mark.parametrize("name", ["openings", "chats"])
def test_the_packaged_prompts_can_be_read(name: str) -> None:
    prompts = read_prompts(PackagedPrompts(name=name))
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 50
    assert {prompt.text is None for prompt in prompts} == {name == "chats"}


def test_a_source_is_told_by_its_type() -> None:
    class Run(Settings):
        prompts: PromptSource = PackagedPrompts()
        """Where prompts come from."""

    assert parse_settings(Run, {"prompts": {"type": "jsonl", "path": "p.jsonl"}}).prompts == PromptFile(
        path="p.jsonl"
    )
    with pytest.raises(InvalidSettings, match=r"prompts\.nam: unknown key; did you mean `name`"):
        parse_settings(Run, {"prompts": {"type": "packaged", "nam": "chats"}})
    with pytest.raises(InvalidSettings, match=r"prompts\.path: Field required"):
        parse_settings(Run, {"prompts": {"type": "jsonl"}})


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
            "id: Input should be a valid string (given: 5); kind: Input should be a valid string (given: 6)",
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
    (message,) = refusal(jsonl('{"id": "good", "text": "Once"}', "", line))
    assert message.startswith(f"line 3: {mistake}")


def test_a_surrogate_pair_is_a_character(jsonl) -> None:
    assert read_prompts(jsonl('{"id": "x", "text": "\\ud83d\\ude00"}'))[0].text == "😀"


def test_a_long_value_is_not_repeated_whole(jsonl) -> None:
    (message,) = refusal(jsonl('{"id": "x", "messages": "' + "long " * 10_000 + '"}'))
    assert len(message) < 200


def test_ten_bad_rows_are_listed_and_the_rest_counted(jsonl) -> None:
    assert refusal(jsonl(*["{}"] * 10))[-1].startswith("line 10:")
    mistakes = refusal(jsonl(*["{}"] * 13))
    assert len(mistakes) == 11
    assert mistakes[9].startswith("line 10:") and mistakes[10] == "and 3 more"


def test_an_id_given_twice_is_refused_with_both_lines(jsonl) -> None:
    source = jsonl('{"id": "a", "text": "x"}', "{", '{"id": "a", "text": "y"}', '{"id": "a", "text": "z"}')
    assert refusal(source)[1:] == [
        "line 3: id: 'a' is already the id of line 1",
        "line 4: id: 'a' is already the id of line 1",
    ]


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
        "line 2: id: '1372a3c27b34acef', made from its content, is already the id of line 1"
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(InvalidSource, match=r"p\.jsonl: no prompt in it"):
        read_prompts(PromptFile(path=str(tmp_path / "p.jsonl")))


def test_a_missing_file_is_named_as_it_was_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSource, match=r"^sub/p\.jsonl: No such file or directory$"):
        read_prompts(PromptFile(path="sub/p.jsonl"))
    with pytest.raises(InvalidSource, match="Is a directory"):
        read_prompts(PromptFile(path=str(tmp_path)))


def test_a_shared_data_set_is_read_by_its_own_field_names() -> None:
    path = DATA / "gsm8k/test.jsonl"
    if not path.exists():
        pytest.skip("the shared data is not here")
    assert len(read_prompts(PromptFile(path=str(path), text_field="question"))) == 1319


def completion(number: int, response_ids: tuple[int, ...] = (7, 8)) -> Completion:
    return Completion(
        id=f"p/{number}",
        prompt_id="p",
        prompt_text="Once",
        prompt_ids=[1, 2, 3],
        response_ids=list(response_ids),
        text=" upon\0é😀",
        stop=StopReason.LENGTH,
    )


ASKED = Message(role="user", content="?")
ROWS = {
    "texts alone": [Prompt(id="a", text="x"), Prompt(id="b", kind="k", text="y")],
    "messages alone": [Prompt(id="a", messages=(Message(role="system", content=""), ASKED))],
    "both forms": [Prompt(id="a", text="x"), Prompt(id="b", messages=(ASKED,))],
    "completions": [completion(0), completion(1, response_ids=(2**40,))],
    "comparisons": [compare("p", "p/0", "p/1")],
    "measurements": [Measurement(metric="gold", item="i", prompt_id="p", value=0.1 + 0.2)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_come_back_as_they_were(tmp_path: Path, rows: list[Settings]) -> None:
    write_rows(rows, tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet", type(rows[0])) == rows


def test_equal_rows_are_equal_bytes_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rlhf_core.records import Prompt; "
        "from rlhf_core.sources import write_rows; "
        "write_rows([Prompt(id=str(i), text='x') for i in range(1000)], Path(sys.argv[1]))"
    )
    rows = [Prompt(id=str(i), text="x") for i in range(1000)]
    write_rows(rows, tmp_path / "one.parquet")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "two.parquet")], check=True)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_a_columns_type_comes_from_the_model_and_not_from_its_values(tmp_path: Path) -> None:
    rows = {
        "text": Prompt(id="a", text="x"),
        "chat": Prompt(id="a", messages=(ASKED,)),
    }
    schemas = []
    for name, row in rows.items():
        write_rows([row], tmp_path / name)
        schemas.append(pq.read_schema(tmp_path / name))
    assert schemas[0] == schemas[1]
    assert str(schemas[0].field("messages").type) == "list<element: struct<role: string, content: string>>"
    assert set(schemas[0].metadata) == {b"huggingface"}  # the features, and no time or path


class Kinds(Settings):
    flag: bool
    count: int | None = None
    names: list[str] = []  # noqa: RUF012
    share: float = 0.0


def test_every_kind_of_field_keeps_its_type_and_empty_lists_are_not_nulls(tmp_path: Path) -> None:
    rows = [Kinds(flag=True), Kinds(flag=False, count=3, names=["a"], share=2)]
    write_rows(rows, tmp_path / "rows")
    assert read_rows(tmp_path / "rows", Kinds) == rows
    assert [str(field.type) for field in pq.read_schema(tmp_path / "rows")] == [
        "bool", "int64", "list<element: string>", "double"
    ]  # fmt: skip


def test_a_field_that_no_column_can_hold_is_named(tmp_path: Path) -> None:
    class Loose(Settings):
        anything: dict[str, str]

    with pytest.raises(TypeError, match=r"dict\[str, str\]"):
        write_rows([Loose(anything={})], tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_rows_are_of_one_model_and_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows: rows of nothing"):
        write_rows([], tmp_path / "rows")
    with pytest.raises(ValueError, match=r"\['Completion', 'Prompt'\]"):
        write_rows([Prompt(id="a", text="x"), completion(0)], tmp_path / "rows")


def test_rows_of_another_model_are_refused_when_read(tmp_path: Path) -> None:
    write_rows([completion(0)], tmp_path / "rows")
    with pytest.raises(InvalidSource, match="holds no rows of Prompt"):
        read_rows(tmp_path / "rows", Prompt)


def test_datasets_loads_the_files(tmp_path: Path, monkeypatch) -> None:
    rows = [Prompt(id="a", text="x"), Prompt(id="b", messages=(ASKED,))]
    write_rows(rows, tmp_path / "rows.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == [row.to_json() for row in rows]
