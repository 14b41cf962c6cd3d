"""The fingerprint sees the code a stage can reach, and no change of it goes by without a word."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.stages import STAGES, fingerprint
from tests.update_fingerprints import COMMAND, Recorded, code_of_today, recorded, unexplained, updated


def test_a_stage_reaches_the_code_that_decides_its_result() -> None:
    found = fingerprint.reachable("rlhf_core.stages.policy_update")
    assert found >= {
        f"rlhf_core.{name}"
        for name in (
            *("stages.policy_update", "stages.context", "algorithms.ppo", "algorithms.optimize", "trunk"),
            *(
                "roles",
                "tensors",
                "kl",
                "losses",
                "advantages",
                "generation.hf",
                "rewards.model",
                "artifacts",
            ),
            "models",  # imported inside a function
        )
    }
    assert not any(name.startswith("rlhf_core.report") for name in found)
    assert "rlhf_core.stages.prompts" not in found  # no stage reaches another's insides


@pytest.mark.parametrize("name", STAGES)
def test_no_stage_reaches_the_floors_above(name: str) -> None:
    reached = fingerprint.reachable(f"rlhf_core.stages.{name}")
    assert all(module.split(".")[0] == "rlhf_core" for module in reached)


def test_a_module_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="has no source file"):
        fingerprint.fingerprint("rlhf_core.nothing")


@pytest.fixture
def of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes files over those of a small package and gives the fingerprint of its stage."""
    package = tmp_path / tmp_path.name.replace("-", "_")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fingerprint, "PACKAGE", package.name)

    def write(**files: str) -> str:
        package.mkdir(exist_ok=True)
        for name, text in files.items():
            (package / f"{name}.py").write_text(text.replace("PACKAGE", package.name))
        return fingerprint.fingerprint.__wrapped__(f"{package.name}.stage")

    write(
        __init__="",
        stage='"""A stage."""\nfrom PACKAGE import near\n\ndef run() -> int:\n    return near.one()\n',
        near="def one() -> int:\n    import PACKAGE.far\n    return PACKAGE.far.ONE\n",
        far="ONE = 1\n",
        apart="TWO = 2\n",
    )
    return write


def test_a_change_shows_however_far_away(of_package: Callable[..., str]) -> None:
    before = of_package()
    assert of_package(far="ONE = 2\n") != before
    assert of_package(far="ONE = 1\n") == before
    assert of_package(near="def one() -> int:\n    return 1\n") != before


def test_what_changes_no_result_does_not_show(of_package: Callable[..., str]) -> None:
    before = of_package()
    assert of_package(far='"""Said anew."""\n\n# And a reason.\nONE = (1)\n') == before
    assert (
        of_package(
            stage="from PACKAGE import near\n\ndef run() -> int:\n    'What it is.'\n    return near.one()\n"
        )
        == before
    )
    assert of_package(apart="TWO = 3\n") == before


def test_the_spelling_of_a_tree_leaves_out_what_pythons_differ_in(tmp_path: Path) -> None:
    # Python 3.12 added `type_params` to functions, and 3.13 leaves empty lists out of a dump.
    source = tmp_path / "code.py"
    source.write_text("def f(a, *, b):\n    return [a, None]\n")
    assert fingerprint._meaning(source) == (
        "Module(body=[FunctionDef(name='f', args=arguments(args=[arg(arg='a')], kwonlyargs=[arg(arg='b')], "
        "kw_defaults=[None]), body=[Return(value=List(elts=[Name(id='a', ctx=Load()), Constant()], "
        "ctx=Load()))])])"
    )


def test_code_that_changed_has_another_version_or_a_reason() -> None:
    left = unexplained(recorded(), code_of_today())
    assert not left, "\n".join(
        [
            *(f"{name}: {what}" for name, what in left.items()),
            "Raise VERSION in a stage whose results differ: what stores hold was made by the old code.",
            f"Then, and where results do not differ: {COMMAND}",
        ]
    )


def test_the_record_follows_versions_and_asks_for_reasons() -> None:
    empty: Recorded = {"stages": {}, "no_effect": []}
    first = updated(empty, {"a": {"version": 1, "fingerprint": "x"}}, "")
    assert first == {"stages": {"a": {"version": 1, "fingerprint": "x"}}, "no_effect": []}

    changed = {"a": {"version": 1, "fingerprint": "y"}}
    assert list(unexplained(first, changed)) == ["a"]
    with pytest.raises(ValueError, match="say why"):
        updated(first, changed, " ")
    told = updated(first, changed, "Renamed.")
    assert told == {**first, "no_effect": [{"why": "Renamed.", "fingerprints": ["y"]}]}
    assert unexplained(told, changed) == {}
    assert updated(told, changed, "Again.") == told

    raised = {"a": {"version": 2, "fingerprint": "z"}}
    assert list(unexplained(told, raised)) == ["a"]
    assert updated(told, raised, "") == {"stages": raised, "no_effect": []}
