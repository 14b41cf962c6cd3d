"""policy_update: where candidate and critic start from, and what the monitors saw is kept."""

from pathlib import Path

import pytest

from rlhf_core.alarms import Action, MonitorsReport
from rlhf_core.algorithms.monitors import Monitors
from rlhf_core.algorithms.monitors.updates import ClipFraction
from rlhf_core.artifacts import MANIFEST, ArtifactRef
from rlhf_core.selection import Selection, last_step
from rlhf_core.stages import run_job
from rlhf_core.stages.policy_update import PolicyUpdate
from tests.rlhf_core.stages.chain import Chain

RATES = ("learning_rate", "value_learning_rate")


@pytest.fixture
def still(played: Chain, tmp_path: Path) -> dict[str, ArtifactRef]:
    """What the stage makes of the played round's policy when nothing is learned."""
    job = played.jobs["policy_update"]
    algorithm = job.settings["algorithm"]
    assert isinstance(algorithm, dict)
    settings = {**job.settings, "algorithm": {**algorithm, **dict.fromkeys(RATES, 0.0)}}
    return run_job(job.model_copy(update={"settings": settings, "work": str(tmp_path)})).outputs


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_the_critic_starts_as_the_reward_model_and_the_candidate_as_the_champion(
    played: Chain, still: dict[str, ArtifactRef]
) -> None:
    reward_model = played.made["reward_modeling"]["reward_model"]
    champion = played.made["bootstrap"]["policy"]
    for made, started in ((still["critic"], reward_model), (still["policy"], champion)):
        assert contents(played.open(made)) == contents(played.open(started))
    learned = played.made["policy_update"]
    assert contents(played.open(learned["critic"])) != contents(played.open(reward_model))
    assert contents(played.open(learned["policy"])) != contents(played.open(champion))


def seen(chain: Chain, shown: str = "policy_update") -> MonitorsReport:
    folder = chain.open(chain.made[shown]["monitors"])
    return MonitorsReport.model_validate_json((folder / "monitors.json").read_bytes())


def test_every_step_is_watched_by_every_monitor_and_the_record_is_an_artifact(played: Chain) -> None:
    report = seen(played)
    assert report.steps == 2 and report.ended_by is None
    assert [record.monitor for record in report.monitors] == list(Monitors.model_fields)
    read = {record.monitor for record in report.monitors if record.worst}
    # Two steps are too few for a window, a median of earlier steps or a trend.
    assert set(Monitors.model_fields) - read <= {"critic_dead", "critic_diverging", "gold", "score_length"}
    told = run_job(played.jobs["policy_update"]).told["alarms"]
    assert told == [alarm.line for alarm in report.alarms]


def test_a_monitor_that_may_stop_ends_the_stage_and_its_candidate_is_written(played: Chain) -> None:
    chain = Chain(played.root, played.execution)
    job = played.jobs["policy_update"]
    stop = Monitors(clip_fraction=ClipFraction(action=Action.STOP, share=1e-6))
    settings = PolicyUpdate.model_validate(job.settings).model_copy(update={"monitors": stop})
    made = chain.run("policy_update", settings, job.inputs, subject="stopped")
    assert set(made) == {"policy", "critic", "monitors", "selection"}
    told = run_job(chain.jobs["policy_update.stopped"]).told
    assert told["metrics"] == {
        "policy/ended_by_budget": 0.0, "policy/ended_by_monitor": 1.0, "policy/candidate_step": 1.0
    }  # fmt: skip
    report = seen(chain, "policy_update.stopped")
    assert (report.ended_by, report.steps) == ("clip_fraction", 1)
    assert made["policy"] != played.made["policy_update"]["policy"]  # one step where the other took two


def test_how_a_stage_is_watched_changes_nothing_of_its_candidate(played: Chain) -> None:
    chain = Chain(played.root, played.execution)
    job = played.jobs["policy_update"]
    off = {name: {"action": "off"} for name in Monitors.model_fields}
    settings = PolicyUpdate.model_validate({**job.settings, "monitors": off})
    made = chain.run("policy_update", settings, job.inputs, subject="unwatched")
    for role in ("policy", "critic"):
        assert made[role].digest == played.made["policy_update"][role].digest
    assert {record.state for record in seen(chain, "policy_update.unwatched").monitors} == {"off"}


def selected(chain: Chain, shown: str) -> Selection:
    folder = chain.open(chain.made[shown]["selection"])
    return Selection.model_validate_json((folder / "selection.json").read_bytes())


def test_which_step_is_the_candidate_and_why_is_an_artifact(played: Chain) -> None:
    assert selected(played, "policy_update") == last_step(2)


def test_what_a_monitor_stopped_may_choose_its_best_step_and_is_stopped_all_the_same(played: Chain) -> None:
    chain = Chain(played.root, played.execution)
    job = played.jobs["policy_update"]
    algorithm = job.settings["algorithm"]
    assert isinstance(algorithm, dict)
    best = {"candidate": "best", "candidate_every": 1, "candidate_prompts": 8, "num_steps": 4}
    ruinous = {
        "learning_rate": 0.3,
        "schedule": "constant",
        "warmup_steps": 8,
        "kl_coef": 0.5,
        "target_kl": 9,
    }
    stop = {"kl": {"action": "stop", "per_token": 0.1, "window": 1}}
    made = {"algorithm": {**algorithm, **best, **ruinous}, "monitors": stop}
    settings = PolicyUpdate.model_validate({**job.settings, **made})
    chain.run("policy_update", settings, job.inputs, subject="both")
    found = selected(chain, "policy_update.both")
    assert found.rule == "best" and 0 < found.step < found.steps
    assert len(found.prompts) == 8 and [one.step for one in found.evaluations] == list(range(found.steps + 1))
    assert seen(chain, "policy_update.both").ended_by == "kl"
    assert run_job(chain.jobs["policy_update.both"]).told["metrics"] == {
        "policy/ended_by_budget": 0.0, "policy/ended_by_monitor": 1.0, "policy/candidate_step": found.step
    }  # fmt: skip
