"""The checklist in README.md is whole, and every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUM_ITEMS, MOST_THAT_CANNOT_APPLY = 52, 6
ROW = re.compile(r"\| (\d+) \| [^|]+ \| ([^|]+) \|")


def items(text: str) -> list[tuple[int, str]]:
    """Number and last cell of every row of the table."""
    return [(int(number), cell) for number, cell in ROW.findall(text)]


def named(cell: str) -> list[str]:
    """The tests that a cell names, as `file::test`."""
    return re.findall(r"`([^`]+\.py::[^`]+)`", cell)


def missing(tests: list[str], root: Path) -> list[str]:
    """Those that are no test function of their file."""
    found = []
    for test in tests:
        file, _, name = test.partition("::")
        path = root / file
        functions = (
            {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
            if path.is_file()
            else set()
        )
        if not name.startswith("test_") or name not in functions:
            found.append(test)
    return found


ITEMS = items((TESTS / "README.md").read_text())


def test_every_item_has_one_line_in_order() -> None:
    assert [number for number, _ in ITEMS] == list(range(1, NUM_ITEMS + 1))


@pytest.mark.parametrize("cell", [cell for _, cell in ITEMS], ids=[str(number) for number, _ in ITEMS])
def test_an_item_is_tested_or_says_why_it_is_not(cell: str) -> None:
    assert missing(named(cell), TESTS) == []
    assert named(cell) or re.match(r"cannot apply: .{20}", cell)


def test_few_items_cannot_apply() -> None:
    cannot = [number for number, cell in ITEMS if cell.startswith("cannot apply")]
    assert len(cannot) <= MOST_THAT_CANNOT_APPLY


def test_a_test_that_is_not_there_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one() -> None: ...\ndef other() -> None: ...\n")
    cell = "`test_a.py::test_one`, `test_a.py::test_two`, `test_a.py::other`, `test_b.py::test_one`, `prose`"
    assert items(f"| # | a | b |\n|---|---|---|\n| 7 | what | {cell} |\n") == [(7, cell)]
    assert missing(named(cell), tmp_path) == [
        "test_a.py::test_two",
        "test_a.py::other",
        "test_b.py::test_one",
    ]
