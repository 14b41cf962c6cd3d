"""A stage runs once: then it is found in the round, or in the store, and MLflow has the one run of it."""

import json
from collections.abc import Callable

import pytest
from prefect.states import State

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.records import Completion, StopReason
from rlhf_core.sources import write_rows
from rlhf_core.stages.pairing import Pairing
from tasks.context import Round, _do
from tasks.project import Project

SEED = 3


def completions(project: Project, *texts: str) -> ArtifactRef:
    rows = [
        Completion(
            id=f"p/{k}",
            prompt_id="p",
            prompt_text=project.name,
            prompt_ids=[1],
            response_ids=[2],
            text=text,
            stop=StopReason.LENGTH,
        )
        for k, text in enumerate(texts)
    ]
    with project.store.writing() as folder:
        write_rows(rows, folder / "completions.parquet")
        return project.store.commit(folder, "completions", "by hand")


def pair(round: Round, ref: ArtifactRef, shown: str = "pairing") -> object:
    return _do(round, "pairing", shown, Pairing(), {"completions": ref}, SEED)


def stage_runs(project: Project) -> list[tuple[str, str]]:
    """(id, status) of every stage's run."""
    runs = project.tracker.client.search_runs([project.tracker.experiment_id], "tags.`rlhf.kind` = 'stage'")
    return [(run.info.run_id, run.info.status) for run in runs]


def test_a_stage_is_computed_once_and_found_ever_after(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    first, ref = open_round(1), completions(project, "a", "b", "c")
    outputs = pair(first, ref)
    assert isinstance(outputs, dict)
    again, later = pair(first, ref), pair(open_round(2), ref)
    for found in (again, later):
        assert isinstance(found, State)
        assert (found.name, found.result()) == ("Cached", outputs)
    computed, reused = (project.ledger.stage(number, "pairing") for number in (1, 2))
    assert computed is not None and reused is not None
    assert (computed.cached, reused.cached) == (False, True)
    assert computed.outputs == reused.outputs == outputs
    assert computed.metrics == reused.metrics == {"preference/comparisons": 3.0}
    assert stage_runs(project) == [(computed.mlflow_run_id, "FINISHED")]
    assert reused.mlflow_run_id == computed.mlflow_run_id
    assert project.executed == {(1, "pairing")}


def test_mlflow_is_told_what_went_in_and_what_came_out(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    ref = completions(project, "a", "b", "c")
    outputs = pair(open_round(1), ref, "pairing.twice")
    assert isinstance(outputs, dict)
    ((run_id, _),) = stage_runs(project)
    run = project.tracker.client.get_run(run_id)
    assert run.data.tags["rlhf.input.completions"] == ref.digest
    assert run.data.tags["rlhf.output.comparisons"] == outputs["comparisons"].digest
    assert run.data.tags["rlhf.subject"] == "pairing.twice"
    assert run.data.metrics["preference/comparisons"] == 3
    (dataset,) = run.inputs.dataset_inputs
    assert json.loads(dataset.dataset.profile) == {"num_rows": 3}


def test_a_stage_that_fails_is_not_pinned_and_its_run_says_so(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    round = open_round(1)
    with pytest.raises(ValueError, match="2 completions give no pair"):
        pair(round, completions(project, "same", "same"))
    assert project.ledger.stages(1) == []
    assert [status for _, status in stage_runs(project)] == ["FAILED"]
    assert project.executed == set()
    # Another input, and it goes on.
    pair(round, completions(project, "a", "b"))
    assert [record.stage for record in project.ledger.stages(1)] == ["pairing"]


def test_a_stage_of_a_round_has_a_seed_of_its_own(open_round: Callable[[int], Round]) -> None:
    first, second = open_round(1), open_round(2)
    seeds = [round.seed(name) for round in (first, second) for name in ("rollouts", "policy_update")]
    assert len(set(seeds)) == 4
    assert first.seed("rollouts") == seeds[0]
