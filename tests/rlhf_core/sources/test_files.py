import gzip
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.records import Prompt
from rlhf_core.settings import Settings
from rlhf_core.sources import FileSource, HubSource, InvalidSource, Row, preferences, prompts, read_prompts
from rlhf_core.sources.files import READ_CHARACTERS

ROWS = [{"text": 'Once, and\n"then"'}, {"text": "é😀"}]
TEXTS = [row["text"] for row in ROWS]


def table(path: Path) -> list[tuple[int, object]]:
    """The number of each row with its values, or with why it cannot be read."""
    rows = FileSource(path=str(path)).rows()
    return [(row.number, row.mistake if row.values is None else row.values) for row in rows]


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


LINES = "\n".join(map(json.dumps, ROWS)).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()
CSV = '\ufefftext,note\n"Once, and\n""then""",\né😀,x\n'.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl.gz", LINES),
        ("a.JSON", b"\n " + ARRAY),
        ("a.json.gz", ARRAY),
        ("a.json", LINES),
        ("a.jsonl", "\ufeff".encode() + LINES),
        ("a.json", "\ufeff".encode() + ARRAY),
        ("a.csv", CSV),
        ("a.csv.gz", CSV.replace(b"\n", b"\r\n").replace(b"and\r\n", b"and\n")),
    ],
)
def test_the_same_rows_come_out_of_every_format(tmp_path: Path, name: str, content: bytes) -> None:
    source = FileSource(path=str(written(tmp_path, name, content)))
    assert [prompt.text for prompt in read_prompts(source)] == TEXTS


def test_parquet_rows_come_out_with_lists_and_nulls(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "?", "name": None}], "text": None},
        {"messages": None, "text": "a"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert table(tmp_path / "a.parquet") == [(1, rows[0]), (2, rows[1])]
    assert [p.shown for p in read_prompts(FileSource(path=str(tmp_path / "a.parquet")))] == ["user: ?", "a"]


def test_text_in_parquet_that_is_not_utf8_spoils_its_row_alone(tmp_path: Path) -> None:
    broken = pa.array([b"a", b"\xff", b"b"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    assert table(tmp_path / "a.parquet") == [(1, {"text": "a"}), (2, "not UTF-8"), (3, {"text": "b"})]


def test_a_folder_is_read_in_the_order_of_its_names_and_only_what_can_hold_rows(tmp_path: Path) -> None:
    written(tmp_path, "b.jsonl", b'{"text": "2"}')
    written(tmp_path, "a/z.csv", b"text\n1\n")
    written(tmp_path, "README.md", b"# not rows")
    written(tmp_path, ".cache/c.jsonl", b'{"text": "hidden"}')
    assert [(row.file, row.values) for row in FileSource(path=str(tmp_path)).rows()] == [
        ("a/z.csv", {"text": "1"}),
        ("b.jsonl", {"text": "2"}),
    ]


def test_rows_of_csv_that_do_not_fit_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", b'a,b\n1,"x\ny"\n2\n\n3,\xff\n4,5,6\n7,\n')
    assert table(path) == [
        (1, {"a": "1", "b": "x\ny"}),
        (2, "1 fields under a header of 2"),
        (3, "not UTF-8"),
        (4, "3 fields under a header of 2"),
        (5, {"a": "7", "b": None}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", r"of no known kind: the name must end in \.jsonl, \.json, \.csv, \.parquet"),
        ("a.csv", b"a,a\n1,2\n", "names a column twice: a, a"),
        ("a.csv", b'a\n"open', "damaged"),
        ("a.parquet", b"PAR1", "damaged"),
        ("a.json", b'[{"a": 1}, {"a"', "damaged after element 1 of its array"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "damaged after element 1 of its array"),
        ("a.json", b'[{"a": 1}', "damaged after element 1 of its array"),
        ("a.json", b"[\xff]", "damaged after element 0 of its array"),
    ],
)
def test_a_damaged_file_is_refused_as_a_whole(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(InvalidSource, match=said):
        table(written(tmp_path, name, content))


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES * 100)[:-20])
    with pytest.raises(InvalidSource, match=r"a\.jsonl\.gz: damaged"):
        table(tmp_path / "a.jsonl.gz")


def test_an_array_may_be_empty_and_its_elements_lie_across_pieces(tmp_path: Path) -> None:
    assert table(written(tmp_path, "a.json", b" [ ] ")) == []
    # Each element is longer than one piece, and a number would end at any cut.
    long = [{"text": "x" * (READ_CHARACTERS + n)} for n in range(3)]
    assert [v for _, v in table(written(tmp_path, "b.json", json.dumps(long).encode()))] == long
    numbers = b"[" + b",".join(b"%d" % n for n in range(20_000)) + b"]"
    assert [v for _, v in table(written(tmp_path, "c.json", numbers))] == [
        f"not a JSON object: {n}" for n in range(20_000)
    ]


def test_what_is_missing_is_named_as_it_was_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSource, match=r"^sub/p\.jsonl: No such file or directory$"):
        read_prompts(FileSource(path="sub/p.jsonl"))
    with pytest.raises(InvalidSource, match="a folder without a file that can hold rows"):
        read_prompts(FileSource(path=str(tmp_path)))


def hub(folder: Path, **settings: str) -> HubSource:
    return HubSource.model_validate({"id": str(folder), **settings})


def test_a_dataset_is_streamed_by_split(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    written(tmp_path, "train.jsonl", b'{"id": "a", "text": "1"}\n{"id": "b", "text": "2"}\n')
    written(tmp_path, "test.jsonl", b'{"id": "c", "text": "3"}\n')
    assert [p.id for p in read_prompts(hub(tmp_path))] == ["a", "b"]
    assert read_prompts(hub(tmp_path, split="test")) == [Prompt(id="c", text="3")]
    assert next(hub(tmp_path, split="test").rows()) == Row(f"{tmp_path}[test]", 1, {"id": "c", "text": "3"})
    with pytest.raises(InvalidSource, match="`datasets` cannot read it"):
        read_prompts(hub(tmp_path, split="validation"))


def test_a_dataset_that_is_not_there_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InvalidSource, match=r"nothing\[train\]: `datasets` cannot read it"):
        read_prompts(hub(tmp_path / "nothing"))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(reading: Iterable[Settings]) -> int:
        tracemalloc.start()
        count = sum(1 for _ in reading)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 10_000
        return size

    rows = [{"prompt": f"{n} " * 200, "chosen": "yes " * 200, "rejected": "no"} for n in range(10_000)]
    lines = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    array = written(tmp_path, "a.json", json.dumps(rows).encode())
    assert lines.stat().st_size > 15 << 20
    assert peak(preferences(FileSource(path=str(lines)))) < 1 << 20
    # Of a prompt its id is kept, as two integers in a dictionary.
    assert peak(prompts(FileSource(path=str(array)))) < (1 << 20) + 10_000 * 200
