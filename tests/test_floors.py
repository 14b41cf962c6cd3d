"""The floors of the house: no import goes up, and each library stays in the rooms that may know it."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WITH_TORCH = {"tensors", "advantages", "kl", "losses", "hardware"}
WITHOUT_TORCH = {
    "rlhf_core",
    "settings",
    "records",
    "artifacts",
    "ledger",
    "sources",
    "metrics",
    "gates",
    "alarms",
    "selection",
    "text_statistics",
    "prompts_data",
}
MODELS = {"models", "pretrained", "tiny_model"}
TRUNK = {"trunk", "forward", "adapters", "own_weights", "roles"}
FLOORS = (
    WITH_TORCH | WITHOUT_TORCH,
    {"batch", "packing", "checkpoints"},
    {"generation"} | TRUNK | MODELS,
    {"algorithms", "rewards", "annotators", "evals", "desk", "report"},
    {"stages"},
    {"tasks"},
    {"flows"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What a room may import on its own floor. On floor 3 only the door, the package itself, may be named.
SIDEWAYS = (
    {(room, other) for room in WITH_TORCH for other in WITH_TORCH | WITHOUT_TORCH}
    | {(room, other) for room in WITHOUT_TORCH for other in WITHOUT_TORCH}
    | {(room, other) for room in MODELS for other in MODELS}
    | {(room, other) for room in TRUNK for other in TRUNK}
    | {("packing", "batch")}
    | {("trunk", "models"), ("forward", "models"), ("generation", "models"), ("generation", "trunk")}
)
THROUGH_THE_DOOR = {
    ("algorithms", "rewards"),
    ("evals", "rewards"),
    ("evals", "annotators"),
    ("annotators", "rewards"),
}

MLFLOW_FILES = {"tasks.mlflow_store", "tasks.registry", "tasks.system_metrics", "tasks.tracking"}


def _modules() -> dict[str, Path]:
    """Every module of the three packages by its dotted name."""
    found = {}
    for package in ("rlhf_core", "tasks", "flows"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _room(module: str) -> str:
    """`rlhf_core.rewards.scores` is in the room `rewards`, `tasks.tracking` in `tasks`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "rlhf_core" and len(parts) > 1 else parts[0]


def _imports(module: str) -> Iterator[str]:
    """Every module that `module` imports anywhere in its text, by its full name."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield submodule if submodule in MODULES else source


def _own_imports() -> Iterator[tuple[str, str]]:
    """All (importer, imported) pairs within the house that leave a room."""
    for module in MODULES:
        for imported in _imports(module):
            if imported.split(".")[0] in ("rlhf_core", "tasks", "flows") and _room(imported) != _room(module):
                yield module, imported


def _may_import(importer: str, imported: str) -> bool:
    room, other = _room(importer), _room(imported)
    if FLOOR_OF[other] != FLOOR_OF[room]:
        return FLOOR_OF[other] < FLOOR_OF[room]
    if (room, other) in THROUGH_THE_DOOR:
        return imported == f"rlhf_core.{other}"
    return (room, other) in SIDEWAYS


def _importers(*libraries: str) -> dict[str, list[str]]:
    """Which modules import one of `libraries`, and what of it."""
    found = {}
    for module in MODULES:
        names = [name for name in _imports(module) if name.split(".")[0] in libraries]
        if names:
            found[module] = names
    return found


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def _import_without(blocked: tuple[str, ...], modules: list[str]) -> subprocess.CompletedProcess[str]:
    lines = [
        "import importlib, sys",
        f"sys.modules.update(dict.fromkeys({blocked}))",  # None there makes an import fail
        f"[importlib.import_module(name) for name in {modules}]",
    ]
    return _run("\n".join(lines))


def test_every_module_has_a_floor() -> None:
    assert sorted(module for module in MODULES if _room(module) not in FLOOR_OF) == []


def test_no_import_goes_up_and_none_sideways_that_is_not_planned() -> None:
    assert [f"{a} imports {b}" for a, b in _own_imports() if not _may_import(a, b)] == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("rlhf_core.batch", "rlhf_core.tensors", True),
        ("rlhf_core.kl", "rlhf_core.tensors", True),
        ("rlhf_core.ledger", "rlhf_core.artifacts", True),
        ("rlhf_core.metrics", "rlhf_core.tensors", False),  # the half without torch
        ("rlhf_core.tensors", "rlhf_core.batch", False),  # up
        ("rlhf_core.models", "rlhf_core.trunk", False),
        ("rlhf_core.algorithms.ppo", "rlhf_core.rewards", True),
        ("rlhf_core.algorithms.ppo", "rlhf_core.rewards.scores", False),  # past the door
        ("rlhf_core.rewards.model", "rlhf_core.annotators", False),
        ("rlhf_core.stages.rollouts", "tasks.tracking", False),
        ("tasks.training", "rlhf_core.stages", True),
        ("tasks.training", "flows.settings", False),
    ],
)
def test_the_plan_tells_up_from_down(importer: str, imported: str, allowed: bool) -> None:
    assert _may_import(importer, imported) is allowed


def test_transformers_and_peft_are_known_to_trunk_models_and_generation_only() -> None:
    outside = {
        module: names
        for module, names in _importers("transformers", "peft").items()
        if _room(module) not in {"generation"} | TRUNK | MODELS
    }
    assert outside == {}


def test_mlflow_is_known_to_its_four_files_only() -> None:
    outside = {m: names for m, names in _importers("mlflow").items() if m not in MLFLOW_FILES}
    assert outside == {}


def test_prefect_is_known_to_tasks_and_flows_only() -> None:
    outside = {m: names for m, names in _importers("prefect").items() if _room(m) not in {"tasks", "flows"}}
    assert outside == {}


def test_flows_never_say_torch() -> None:
    assert {m: names for m, names in _importers("torch").items() if _room(m) == "flows"} == {}


def test_the_core_runs_where_prefect_and_mlflow_are_not_installed() -> None:
    modules = [module for module in MODULES if module.startswith("rlhf_core")]
    result = _import_without(("prefect", "mlflow"), modules)
    assert result.returncode == 0, result.stderr


def test_the_half_of_the_ground_floor_without_torch_runs_where_it_is_not_installed() -> None:
    modules = [module for module in MODULES if _room(module) in WITHOUT_TORCH]
    result = _import_without(("torch", "transformers", "peft"), modules)
    assert result.returncode == 0, result.stderr


def test_a_blocked_library_cannot_be_imported() -> None:
    result = _import_without(("torch",), ["torch"])
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported(module: str) -> None:
    importlib.import_module(module)
