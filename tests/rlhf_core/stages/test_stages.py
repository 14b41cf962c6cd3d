"""The stages as a chain: each hands the next what it reads, and does nothing twice."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.records import Completion
from rlhf_core.settings import Execution
from rlhf_core.sources import read_rows
from rlhf_core.stages import STAGES, run_job, stage
from tests.rlhf_core.stages.chain import SEED, Chain

MADE = {
    "bootstrap": {"trunk": "trunk", "policy": "policy"},
    "prompts": {"labelling_prompts": "prompts", "policy_prompts": "prompts", "held_out_prompts": "prompts"},
    "rollouts": {"completions": "completions"},
    "pairing": {"comparisons": "comparisons"},
    "preferences": {"preferences": "preferences"},
    "reward_modeling": {"reward_model": "reward_model"},
    "reward_validation": {"reward_report": "reward_report"},
    "policy_update": {
        "policy": "policy",
        "critic": "critic",
        "monitors": "monitors",
        "selection": "selection",
    },
    "measurement.champion": {"measurements": "measurements"},
    "measurement.candidate": {"measurements": "measurements"},
    "comparison": {"comparison": "comparison"},
    "promotion": {"decision": "decision"},
    "rebase": {"trunk": "trunk", "policy": "policy"},
}


def elsewhere(played: Chain, root: Path, execution: Execution) -> Chain:
    """The same artifacts in a store that remembers no work."""
    shutil.copytree(played.root / "store" / "objects", root / "store" / "objects")
    return replace(played, root=root, execution=execution, jobs={}, made={})


def again(played: Chain, chain: Chain, shown: str) -> dict[str, str]:
    """The digests of a job that is done once more in another store."""
    job = played.jobs[shown]
    done = run_job(
        job.model_copy(
            update={
                "store": str(chain.store.root),
                "work": str(chain.root / "work" / shown),
                "execution": chain.execution,
            }
        )
    )
    return {role: ref.digest for role, ref in done.outputs.items()}


def test_a_round_makes_each_kind_of_artifact(played: Chain) -> None:
    made = {shown: {role: ref.kind for role, ref in refs.items()} for shown, refs in played.made.items()}
    assert made == MADE
    assert {shown.split(".")[0] for shown in made} == set(STAGES)


def test_every_stage_bears_the_name_it_is_found_by() -> None:
    assert [stage(name).NAME for name in STAGES] == list(STAGES)
    with pytest.raises(ValueError, match="no stage 'rollout'; the stages are bootstrap, prompts"):
        stage("rollout")


def test_a_job_that_was_done_is_found_and_not_computed(played: Chain) -> None:
    for job in played.jobs.values():
        first = run_job(job)
        shutil.rmtree(job.work)
        assert run_job(job) == first
        assert [path.name for path in Path(job.work).iterdir()] == ["result.json"]  # no metrics.jsonl


def test_a_job_whose_artifact_is_gone_is_computed_again(played: Chain, tmp_path: Path) -> None:
    chain = elsewhere(played, tmp_path, played.execution)
    before = again(played, chain, "pairing")
    shutil.rmtree(chain.store.root / "objects" / before["comparisons"])
    assert again(played, chain, "pairing") == before
    assert (chain.root / "work" / "pairing" / "metrics.jsonl").read_text().count("\n") == 1


def test_the_size_of_micro_batches_changes_no_digest(played: Chain, tmp_path: Path) -> None:
    # 64 tokens are one row or two of 32: every forward pass has other neighbours than at 2048.
    chain = elsewhere(played, tmp_path, Execution(device="cpu", num_threads=1, tokens_per_micro_batch=64))
    for shown in ("measurement.candidate", "reward_validation", "comparison"):
        assert again(played, chain, shown) == {r: ref.digest for r, ref in played.made[shown].items()}


def test_another_seed_gives_other_completions_of_the_same_prompts(played: Chain, tmp_path: Path) -> None:
    chain = elsewhere(played, tmp_path, played.execution)
    job = played.jobs["rollouts"]
    refs = [
        run_job(
            job.model_copy(update={"store": str(chain.store.root), "work": str(tmp_path / "w"), "seed": s})
        )
        for s in (SEED, SEED + 1)
    ]
    one, other = (
        read_rows(chain.open(r.outputs["completions"]) / "completions.parquet", Completion) for r in refs
    )
    assert refs[0].outputs == played.made["rollouts"]
    assert [c.id for c in one] == [c.id for c in other]
    # 8 bytes out of 260 each: that two completions agree by chance is out of the question.
    assert not any(a.response_ids == b.response_ids for a, b in zip(one, other, strict=True))


def test_a_recipe_tells_how_it_was_made(played: Chain) -> None:
    told = run_job(played.jobs["policy_update"]).told
    assert set(told) == {
        "metrics",
        "alarms",
        "seconds",
        "execution",
        "fingerprint",
        "host",
        "process",
        "version",
    }
    assert told["execution"] == played.execution.to_json()
    assert told["metrics"] == {
        "policy/ended_by_budget": 0.0,
        "policy/ended_by_monitor": 0.0,
        "policy/candidate_step": 2.0,
    }
