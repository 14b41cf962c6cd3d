import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.data import describe, show, source_at
from rlhf_core.settings import InvalidSettings
from rlhf_core.sources import FileSource, HubSource


def written(folder: Path, *rows: object) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "rows.jsonl")


def pair(chosen: str) -> dict[str, str]:
    return {"prompt": "Why?", "chosen": chosen, "rejected": "no"}


def test_a_description_counts_measures_and_shows(tmp_path: Path) -> None:
    path = written(tmp_path, pair("a"), pair("abc"), pair(""), pair("ab"), pair("abcd"))
    found = describe(FileSource(path=path))
    assert found["kind"] == "preferences"
    assert found["schemas"] == {"rows.jsonl": "prompt/chosen/rejected"}
    assert (found["rows"], found["records"], found["bad_rows"], found["refused"]) == (5, 4, 1, True)
    assert found["mistakes"] == [
        "rows.jsonl, row 3: chosen: empty: there is nothing to learn from (given: '')"
    ]
    # Lengths 1, 2, 3, 4: the middle of four is the second, and 95 of 100 end in the third.
    assert found["characters"]["a"] == {"min": 1, "median": 2, "p95": 3, "max": 4}
    assert [example["a"] for example in found["examples"]] == ["a", "abc", "ab"]
    json.dumps(found)


def test_a_kind_can_be_asked_for_and_a_limit_kept(tmp_path: Path) -> None:
    path = written(tmp_path, *({"question": f"{n}?", "answer": "so"} for n in range(5)))
    assert describe(FileSource(path=path))["kind"] == "demonstrations"
    found = describe(FileSource(path=path), "prompts", limit=2)
    assert (found["kind"], found["records"], found["rows"]) == ("prompts", 2, 2)


def test_the_screen_is_not_commanded_by_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "\x1b[2J[red]x\u202e", "response": "y" * 1000})
    screen = io.StringIO()
    show(describe(FileSource(path=path)), Console(file=screen, force_terminal=True))
    said = screen.getvalue()
    assert "\x1b" not in said and "\u202e" not in said
    assert "⟨U+001B⟩[2J[red]x⟨U+202E⟩" in said
    assert "and 700 more characters" in said
    assert "recognised in rows.jsonl: prompt/response" in said


def test_a_source_is_a_path_or_an_id_on_the_hub(tmp_path: Path) -> None:
    path = written(tmp_path, {"q": "?"})
    assert source_at(path, ["prompt=q"]) == FileSource(path=path, columns={"prompt": "q"})
    assert source_at("hub:owner/name") == HubSource(id="owner/name")
    with pytest.raises(InvalidSettings, match="there is no file or folder 'nowhere'"):
        source_at("nowhere")
    with pytest.raises(InvalidSettings, match="write it as field=column"):
        source_at(path, ["prompt"])
