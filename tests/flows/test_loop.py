"""What a run plans to do, before it does anything."""

import json
from pathlib import Path

import pytest

from flows.loop import check
from flows.settings import RunSettings, load_run_file
from rlhf_core.algorithms.sft import SFT
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import DecisionRecord, Ledger, ProjectRecord, RoundRecord
from rlhf_core.settings import InvalidSettings
from rlhf_core.sources import FileSource, demonstrations
from rlhf_core.stages.bootstrap import fingerprint_of, resolve

SETTINGS = load_run_file(Path(__file__).parents[2] / "infra" / "runs" / "tiny-cpu.yaml")
REF = ArtifactRef(kind="policy", digest="a" * 64, key="k")


def with_rounds(home: Path, decided: int) -> None:
    """A project on the run file's base that has had `decided` rounds."""
    bootstrap, _ = resolve(SETTINGS.bootstrap, SETTINGS.execution)
    ledger = Ledger(home / "projects", SETTINGS.project)
    opened = {"bootstrap": bootstrap.to_json()}
    base = SETTINGS.bootstrap.base.fingerprint()
    ledger.open_project(
        ProjectRecord(name=SETTINGS.project, settings=opened, base=base, inputs={"policy": REF})
    )
    for number in range(1, decided + 1):
        ledger.open_round(
            RoundRecord(
                round=number,
                settings={},
                seed=0,
                champion=REF,
                source=REF,
                mlflow_run_id="m",
                prefect_flow_run_id="p",
            )
        )
        ledger.decide(
            DecisionRecord(
                round=number,
                outcome="rejected",
                candidate=REF,
                parent=REF,
                gates=[],
                metrics={},
                alarms=[],
                decided_at="now",
            )
        )


def test_rounds_is_how_many_the_project_shall_have_had_and_more_adds(tmp_path: Path) -> None:
    with_rounds(tmp_path, 3)
    assert check(SETTINGS, tmp_path, 2, None).rounds == 2
    assert check(SETTINGS, tmp_path, None, 2).rounds == 5
    assert check(SETTINGS, tmp_path, None, None).rounds == 1


def test_rounds_and_more_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="give one"):
        check(SETTINGS, tmp_path, 2, 2)


def test_a_project_keeps_its_base_and_its_adapter(tmp_path: Path) -> None:
    with_rounds(tmp_path, 1)
    other_seed = SETTINGS.bootstrap.base.model_copy(update={"seed": 5})
    for update in ({"base": other_seed}, {"length_bucket": 64}, {"weights": "full"}):
        changed = SETTINGS.model_copy(update={"bootstrap": SETTINGS.bootstrap.model_copy(update=update)})
        with pytest.raises(InvalidSettings, match="name a new project"):
            check(changed, tmp_path, None, None)


def test_a_project_that_was_opened_before_a_setting_had_a_name_goes_on(tmp_path: Path) -> None:
    bootstrap, _ = resolve(SETTINGS.bootstrap, SETTINGS.execution)
    opened = {name: value for name, value in bootstrap.to_json().items() if name != "weights"}
    record = ProjectRecord(
        name=SETTINGS.project,
        settings={"bootstrap": opened},
        base=SETTINGS.bootstrap.base.fingerprint(),
        inputs={"policy": REF},
    )
    Ledger(tmp_path / "projects", SETTINGS.project).open_project(record)
    assert check(SETTINGS, tmp_path, None, None).bootstrap == bootstrap
    full = SETTINGS.model_copy(
        update={"bootstrap": SETTINGS.bootstrap.model_copy(update={"weights": "full"})}
    )
    with pytest.raises(InvalidSettings, match="kind of weights"):
        check(full, tmp_path, None, None)


def tuned_on(path: Path) -> RunSettings:
    """The run file's settings with fine-tuning on a file."""
    sft = SFT(demonstrations=FileSource(path=str(path)), demonstrations_per_minibatch=4)
    return SETTINGS.model_copy(update={"bootstrap": SETTINGS.bootstrap.model_copy(update={"sft": sft})})


def written(path: Path, *responses: str) -> Path:
    rows = [{"prompt": f"p{n}", "response": text} for n, text in enumerate(responses)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_project_is_not_reopened_on_other_demonstrations(tmp_path: Path) -> None:
    file = written(tmp_path / "answers.jsonl", *"abcdefgh")
    settings = tuned_on(file)
    bootstrap, _ = resolve(settings.bootstrap, settings.execution)
    assert bootstrap.sft is not None
    Ledger(tmp_path / "projects", SETTINGS.project).open_project(
        ProjectRecord(
            name=SETTINGS.project,
            settings={"bootstrap": bootstrap.to_json()},
            base=SETTINGS.bootstrap.base.fingerprint(),
            demonstrations=fingerprint_of(demonstrations(bootstrap.sft.demonstrations)),
            inputs={"policy": REF},
        )
    )
    assert check(settings, tmp_path, None, None).rounds == 1
    written(file, *"abcdefgz")
    with pytest.raises(InvalidSettings, match="does not hold the demonstrations any more"):
        check(settings, tmp_path, None, None)
    written(file, *"abcdefgh")
    assert check(settings, tmp_path, None, None).rounds == 1
    with pytest.raises(InvalidSettings, match="kind of weights or fine-tuning"):
        check(SETTINGS, tmp_path, None, None)


def test_a_project_that_was_opened_before_there_was_fine_tuning_goes_on(tmp_path: Path) -> None:
    bootstrap, _ = resolve(SETTINGS.bootstrap, SETTINGS.execution)
    before = {name: value for name, value in bootstrap.to_json().items() if name != "sft"}
    Ledger(tmp_path / "projects", SETTINGS.project).open_project(
        ProjectRecord(
            name=SETTINGS.project,
            settings={"bootstrap": before},
            base=SETTINGS.bootstrap.base.fingerprint(),
            inputs={"policy": REF},
        )
    )
    assert check(SETTINGS, tmp_path, None, None).rounds == 1


def test_what_is_recorded_as_resolved_holds_no_auto(tmp_path: Path) -> None:
    plan = check(SETTINGS, tmp_path, None, None)
    assert plan.bootstrap.dtype != "auto" and plan.execution.device != "auto"
