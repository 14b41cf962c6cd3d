"""`rlhf doctor` says what is there, what is missing, and how to get it."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import doctor
from flows.cli import app
from flows.doctor import Finding, examine, healthy


def test_it_finds_what_is_declared_and_measures_the_machine(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path / "home"), "--json"])
    assert done.exit_code == 0, done.output
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["value"] == metadata.version("torch")
    assert {"prefect", "mlflow", "transformers", "datasets", "peft", "vaderSentiment"} <= set(found)
    assert "pytest" not in found
    # Any machine that runs these tests multiplies more than a billion numbers a second.
    assert int(found["float32 products"]["value"].split()[0]) > 1
    assert "projects: none yet" in found["home"]["value"]
    assert not (tmp_path / "home").exists()


def test_a_home_of_a_newer_version_is_an_illness(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text('{"format": 99, "version": "9.9"}')
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path)])
    assert done.exit_code == 1
    assert "Install 9.9 or newer" in done.output
    assert "Something that is needed is missing." in done.output


def test_a_missing_package_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=99", "nowhere-to-be-found>=1", 'missing-gold<2; extra == "quickstart"']
    for_work_on_it = ['missing-test<2; extra == "test"', 'missing-rival<2; extra == "bench"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked + for_work_on_it)
    torch, nowhere, gold = doctor._packages()
    assert (torch.ok, torch.needed) == (False, True) and 'pip install "torch>=99"' in torch.advice
    assert nowhere == Finding(
        "nowhere-to-be-found", "not installed", False, True, 'pip install "nowhere-to-be-found>=1"'
    )
    # What only the quickstart needs does not make a machine unfit.
    assert healthy([gold]) and not gold.ok
    assert not healthy([nowhere])


def test_examining_names_the_projects_of_a_home(tmp_path: Path) -> None:
    (tmp_path / "projects" / "mine" / "ledger").mkdir(parents=True)
    (tmp_path / "projects" / "mine" / "ledger" / "project.json").write_text("{}")
    assert "projects: mine" in next(f for f in examine(tmp_path) if f.name == "home").value
