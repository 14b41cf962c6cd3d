import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhf_core.records import (
    Choice,
    Completion,
    Demonstration,
    ImportedPreference,
    Measurement,
    Message,
    Prompt,
    StopReason,
    compare,
)
from rlhf_core.settings import Settings
from rlhf_core.sources import InvalidSource, read_column, read_rows, rowsets, write_rows


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
    "demonstrations": [Demonstration(prompt=Prompt(id="a", text="x"), response="y")],
    "imported preferences": [
        ImportedPreference(
            prompt=Prompt(id="a", messages=(ASKED,)),
            completion_a="x",
            completion_b="y",
            choice=Choice.TIE,
            margin=margin,
            file="f",
            row=1,
        )
        for margin in (None, 0.5)
    ],
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


def test_rows_are_written_and_taken_across_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowsets, "ROWS_PER_GROUP", 3)
    rows = [Prompt(id=str(i), text="x") for i in range(8)]
    write_rows(iter(rows), tmp_path / "rows")
    assert pq.read_metadata(tmp_path / "rows").num_row_groups == 3
    assert read_rows(tmp_path / "rows", Prompt) == rows
    assert read_column(tmp_path / "rows", "id") == [row.id for row in rows]
    places = [7, 0, 3, 2, 7]
    assert read_rows(tmp_path / "rows", Prompt, places) == [rows[place] for place in places]
    assert read_rows(tmp_path / "rows", Prompt, []) == []


def test_rows_are_taken_from_their_source_only_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowsets, "ROWS_PER_GROUP", 10)
    most_alive, alive = 0, 0

    class Counted(Prompt):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def rows() -> Iterator[Prompt]:
        nonlocal most_alive, alive
        for number in range(200):
            alive += 1
            most_alive = max(most_alive, alive)
            yield Counted(id=str(number), text="x")

    write_rows(rows(), tmp_path / "rows")
    assert most_alive <= 22  # one group being written, the next being read


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
