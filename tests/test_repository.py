"""Promises about the repository's own files: run files, sizes, the metrics table, declared dependencies."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("rlhf_core", "tasks", "flows")
SOURCES = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
RUN_FILES = sorted((REPOSITORY / "infra" / "runs").glob("*.yaml"))

FILE_LINES = 300
FUNCTION_LINES = 60
AREAS = (
    "sft",
    "rebase",
    "objective",
    "policy",
    "value",
    "reward_model",
    "preference",
    "rollout",
    "eval",
    "gate",
    "optim",
    "time",
)
HOLE = "<>"  # stands for what an f-string fills in, and for a `<word>` in the README
METRIC = re.compile(rf"({'|'.join(AREAS)})/[a-z0-9_./<>]+")


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def _literal(node: ast.expr) -> str:
    """The text of a string or f-string, with a hole for each value that is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else HOLE


def _metrics_in(tree: ast.AST) -> set[str]:
    """Every string below `tree` that is the name of a metric."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    inner = {id(part) for node in strings if isinstance(node, ast.JoinedStr) for part in node.values}
    return {text for node in strings if id(node) not in inner and METRIC.fullmatch(text := _literal(node))}


def _metrics_table(markdown: str) -> set[str]:
    """The metrics that the rows of a table name in backticks, each hole written the same."""
    cells = [line.split("|")[1] for line in markdown.splitlines() if line.startswith("|")]
    names = [re.sub(r"<[^>]*>", HOLE, name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {name for name in names if METRIC.fullmatch(name)}


def _fits(name: str, other: str) -> bool:
    """Whether `name`, its holes filled in, can be `other`."""
    return re.fullmatch(".+".join(re.escape(part) for part in name.split(HOLE)), other) is not None


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _requirements(*extras: str) -> dict[str, SpecifierSet]:
    """What the project asks for, alone and with `extras`: distributions and their ranges."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for e in extras for line in project["optional-dependencies"][e]),
    ]
    wanted = [Requirement(line) for line in lines]
    return {_normal(r.name): r.specifier for r in wanted if r.name != project["name"]}


def _imported() -> set[str]:
    """The distributions that the packages import by name, the standard library and our own left out."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    providers = importlib.metadata.packages_distributions()
    outside = names - set(sys.stdlib_module_names) - set(PACKAGES)
    # mlflow-skinny and mlflow both bring the package `mlflow`: one that is declared is enough.
    declared = _requirements("quickstart")
    found = [[_normal(name) for name in providers.get(package, [package])] for package in outside]
    return {min(names, key=lambda name: name not in declared) for names in found}


def test_there_are_run_files_to_test() -> None:
    assert {"quickstart.yaml", "tiny-cpu.yaml"} <= {path.name for path in RUN_FILES}


@pytest.mark.parametrize("path", RUN_FILES, ids=_name)
def test_every_shipped_run_file_is_valid(path: Path) -> None:
    from flows.settings import RunSettings, load_run_file

    assert isinstance(load_run_file(path), RunSettings)


def test_the_readmes_run_file_is_valid(tmp_path: Path) -> None:
    from flows.settings import RunSettings, load_run_file

    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "run.yaml").write_text(blocks[0])
    assert isinstance(load_run_file(tmp_path / "run.yaml"), RunSettings)


def test_every_file_is_at_most_300_lines() -> None:
    lengths = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_every_function_is_at_most_60_lines() -> None:
    lengths = {
        f"{_name(path)}: {function.name}": function.end_lineno - function.lineno + 1
        for path in SOURCES
        for function in _functions(path)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_every_logged_metric_has_its_line_in_the_readme() -> None:
    logged = {name for path in SOURCES for name in _metrics_in(ast.parse(path.read_text()))}
    documented = _metrics_table((REPOSITORY / "README.md").read_text())
    missing = {name for name in logged if not any(_fits(name, d) or _fits(d, name) for d in documented)}
    assert sorted(missing) == []


def test_metric_names_are_found_in_code_and_table() -> None:
    code = "log({'eval/kl': x, f'rollout/stop.{reason}': y, f'{area}/loss': z, 'docs/kl': 0, 'eval/ kl': 0})"
    assert _metrics_in(ast.parse(code)) == {"eval/kl", "rollout/stop.<>"}
    table = "| name | how |\n|---|---|\n| `eval/kl`, `time/<stage>` | mean of `eval/other` |\n`eval/prose`"
    assert _metrics_table(table) == {"eval/kl", "time/<>"}
    assert _fits("rollout/stop.<>", "rollout/stop.eos") and not _fits("rollout/stop.<>", "rollout/stop.")
    assert not _fits("eval/kl", "eval/kl_to_initial")


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported() -> None:
    declared = set(_requirements("quickstart"))
    assert _imported() - declared == set(), "imported but not in pyproject.toml"
    assert declared - _imported() == set(), "in pyproject.toml but imported nowhere"


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    lines = (REPOSITORY / "infra" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {_normal(name): version for name, version in pins.items()}
    wanted = _requirements("quickstart", "test")
    assert {name: pins.get(name) for name, asked in wanted.items() if pins.get(name, "") not in asked} == {}
