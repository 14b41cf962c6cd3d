"""A rebase: the champion becomes the trunk, and the initial policy, of all rounds to come."""

from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core.artifacts import derive_seed
from rlhf_core.evals import Evals
from rlhf_core.ledger import DecisionRecord, RebaseRecord
from rlhf_core.stages.bootstrap import Bootstrap
from rlhf_core.stages.rebase import Rebase
from tasks.context import result_of
from tasks.project import Project


def merge_champion(project: Project, won: DecisionRecord) -> RebaseRecord:
    """The rebase after the project's last round, merged and recorded; `won` put the champion in service."""
    ledger = project.ledger
    last, promoted = ledger.round(ledger.rounds()[-1]), ledger.round(won.round)
    measured = ledger.stage(won.round, "measurement.candidate")
    assert last is not None and promoted is not None and measured is not None and won.candidate is not None
    settings = Rebase(
        lora=Bootstrap.model_validate(ledger.project().settings["bootstrap"]).lora,
        temperature=Evals.model_validate(promoted.settings["evals"]).held_out.sampling.temperature,
    )
    trunk = ledger.anchor()["trunk"]
    inputs = {"trunk": trunk, "policy": won.candidate, "measured": measured.outputs["measurements"]}
    seed = derive_seed(last.seed, "rebase", last.round)
    job, key = project.job("rebase", settings.to_json(), inputs, seed)
    doing = task(name="rebase", cache_policy=NO_CACHE, persist_result=False, tags=["gpu"])(result_of)
    # Beside the rounds, as bootstrap is: it belongs to none of them.
    done = doing(project, 0, job, key, f"rebase-{last.round:04d}")
    return ledger.rebase(
        RebaseRecord(
            round=last.round,
            key=key,
            trunk=done.outputs["trunk"],
            policy=done.outputs["policy"],
            champion=won.candidate,
            old_trunk=trunk,
            metrics=done.metrics,
            mlflow_run_id=done.mlflow_run_id,
            rebased_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )
