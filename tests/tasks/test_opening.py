"""A project is opened once: its trunk, what the base was tuned on, and an MLflow run that tells how."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.algorithms.sft import SFT
from rlhf_core.artifacts import Store
from rlhf_core.models import TinyModel
from rlhf_core.records import Demonstration, Prompt
from rlhf_core.settings import Execution, Json
from rlhf_core.sources import FileSource, count_rows
from rlhf_core.stages.bootstrap import Bootstrap, fingerprint_of
from rlhf_core.trunk import Lora
from tasks.opening import import_demonstrations, open_project
from tasks.project import Project
from tests.tasks.conftest import Told, home_with

SETTINGS: dict[str, Json] = {"seed": 1}


@pytest.fixture
def unopened(empty_database: Path, tmp_path: Path) -> Iterator[Project]:
    project = Project(
        home_with(empty_database, tmp_path / "home"), "new", Execution(device="cpu", num_threads=1), Told()
    )
    yield project
    project.teller.stop()


def bootstrap(path: Path | None) -> Bootstrap:
    sft = None
    if path is not None:
        path.write_text("\n".join(f'{{"prompt": "p{n}:", "response": "r{n}"}}' for n in range(40)))
        sft = SFT(
            demonstrations=FileSource(path=str(path)),
            lora=Lora(rank=2, alpha=4),
            num_epochs=1,
            demonstrations_per_minibatch=8,
            held_out_share=0.2,
        )
    base = TinyModel(hidden_size=16, num_layers=1, num_heads=2, context_length=64)
    return Bootstrap(base=base, dtype="float32", length_bucket=32, lora=Lora(rank=2), sft=sft)


def records() -> list[Demonstration]:
    return [Demonstration(prompt=Prompt(id=f"p{n}", text=f"p{n}:"), response=f"r{n}") for n in range(5)]


def test_a_project_keeps_what_its_base_was_tuned_on(unopened: Project, tmp_path: Path) -> None:
    record = open_project(unopened, bootstrap(tmp_path / "answers.jsonl"), "base", 1, SETTINGS)
    assert set(record.inputs) == {"demonstrations", "trunk", "policy"}
    imported = unopened.store.open(record.inputs["demonstrations"])
    assert count_rows(imported / "demonstrations.parquet") == 40
    assert len(record.demonstrations) == 64


def test_mlflow_is_told_of_the_fine_tuning(unopened: Project, tmp_path: Path) -> None:
    record = open_project(unopened, bootstrap(tmp_path / "answers.jsonl"), "base", 1, SETTINGS)
    (run,) = unopened.tracker.client.search_runs([unopened.tracker.experiment_id])
    assert (run.info.run_name, run.info.status) == ("bootstrap", "FINISHED")
    assert {"sft/loss", "sft/held_out_loss", "sft/held_out_loss_merged", "sft/lr"} <= set(run.data.metrics)
    assert run.data.tags["rlhf.output.trunk"] == record.inputs["trunk"].digest
    (read,) = run.inputs.dataset_inputs
    assert read.dataset.name == "demonstrations"
    display = unopened.display
    assert isinstance(display, Told)
    assert ("finished", "bootstrap", "computed") in display.lines
    assert any(line[0] == "progress" for line in display.lines)


def test_an_open_project_is_not_opened_again(unopened: Project, tmp_path: Path) -> None:
    asked = bootstrap(tmp_path / "answers.jsonl")
    first = open_project(unopened, asked, "base", 1, SETTINGS)
    (tmp_path / "answers.jsonl").unlink()
    assert open_project(unopened, asked, "base", 1, SETTINGS) == first
    assert unopened.executed == {(0, "bootstrap")}


def test_a_trunk_that_was_made_before_its_project_was_recorded_is_found(
    unopened: Project, tmp_path: Path
) -> None:
    asked = bootstrap(tmp_path / "answers.jsonl")
    first = open_project(unopened, asked, "base", 1, SETTINGS)
    (unopened.ledger.root / "project.json").unlink()  # the process was killed between the two
    unopened.executed.clear()
    assert open_project(unopened, asked, "base", 1, SETTINGS) == first
    assert unopened.executed == set()


def test_a_project_without_fine_tuning_reads_no_demonstrations(unopened: Project) -> None:
    record = open_project(unopened, bootstrap(None), "base", 1, SETTINGS)
    assert set(record.inputs) == {"trunk", "policy"}
    assert record.demonstrations == ""


def test_equal_demonstrations_are_one_artifact_wherever_they_come_from(tmp_path: Path) -> None:
    first, second = (import_demonstrations(Store(tmp_path / name), iter(records())) for name in "ab")
    assert first == second
    assert first[1] == fingerprint_of(records())
    changed = [*records()[:-1], records()[-1].model_copy(update={"response": "else"})]
    other = import_demonstrations(Store(tmp_path / "a"), changed)
    assert other[0].digest != first[0].digest and other[1] != first[1]
