"""A policy update that is killed goes on from its last checkpoint, to the bits of an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.metrics import read_lines
from rlhf_core.stages import run_job
from rlhf_core.stages.context import Job
from tests.rlhf_core.stages.chain import Chain

NUM_STEPS, EVERY, KILLED_AFTER = 10, 5, 7
ALGORITHM = {
    "num_steps": NUM_STEPS,
    "rollouts_per_step": 16,
    # A coefficient that is steered and a reference that moves: both live in the checkpoint.
    "kl_target": 0.01,
    "kl_horizon": 50,
    "refresh_steps": 4,
    "learning_rate": 1e-3,
}


def policy_update(played: Chain, root: Path, **changed: object) -> Job:
    """The chain's policy update made longer, in a store that remembers no work."""
    shutil.copytree(played.root / "store" / "objects", root / "store" / "objects")
    job = played.jobs["policy_update"]
    settings = json.loads(json.dumps(job.settings))
    settings["algorithm"].update({**ALGORITHM, **changed})
    execution = job.execution.model_copy(update={"checkpoint_steps": EVERY})
    return job.model_copy(
        update={
            "settings": settings,
            "execution": execution,
            "store": str(root / "store"),
            "work": str(root / "work"),
        }
    )


def numbers(job: Job) -> list[tuple[int, dict[str, float]]]:
    """All that the stage told of each step, but for when and how long."""
    told = read_lines(Path(job.work) / "metrics.jsonl")
    return [
        (line["step"], {n: v for n, v in line["metrics"].items() if not n.startswith("time/")})  # type: ignore[attr-defined,misc]
        for line in told
    ]


def killed(job: Job, after: int) -> None:
    """The job in a process of its own, killed after so many steps."""
    work = Path(job.work)
    work.mkdir(parents=True)
    (work / "job.json").write_text(job.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_core.stages", str(work / "job.json"), str(os.getpid())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(read_lines(work / "metrics.jsonl")) < after and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def straight(played: Chain, tmp_path: Path) -> Job:
    job = policy_update(played, tmp_path / "straight")
    run_job(job)
    return job


def test_ten_steps_straight_equal_five_a_kill_and_five_more(
    played: Chain, straight: Job, tmp_path: Path
) -> None:
    job = policy_update(played, tmp_path / "killed")
    killed(job, KILLED_AFTER)
    checkpoints = Path(job.work) / "checkpoints"
    assert [path.name for path in checkpoints.glob("[0-9]*")] == [f"{EVERY:06d}"]
    assert {path.name for path in (checkpoints / f"{EVERY:06d}").iterdir()} == {
        "policy.safetensors", "value.safetensors", "reference.safetensors", "state.json"
    }  # fmt: skip
    started = len(read_lines(Path(job.work) / "progress.jsonl"))
    done = run_job(job)
    assert done.outputs == run_job(straight).outputs
    assert numbers(job) == numbers(straight)
    assert [step for step, _ in numbers(job)][:-1] == list(range(NUM_STEPS))
    coefficients = [metrics["objective/kl_coef"] for _, metrics in numbers(job)[:-1]]
    assert len(set(coefficients)) == NUM_STEPS
    assert started >= KILLED_AFTER and not checkpoints.exists()  # what is done needs none


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(
    played: Chain, straight: Job, tmp_path: Path
) -> None:
    job = policy_update(played, tmp_path / "killed")
    killed(job, KILLED_AFTER)
    (policy,) = Path(job.work).glob("checkpoints/*/policy.safetensors")
    policy.write_bytes(policy.read_bytes()[:-4] + b"\0\0\0\1")
    done = run_job(job)
    assert done.outputs == run_job(straight).outputs
    assert numbers(job) == numbers(straight)
    (alarm,) = done.told["alarms"]  # type: ignore[misc]
    assert "the checkpoint of step 5 is not used: policy.safetensors changed" in str(alarm)


@pytest.mark.slow
def test_the_best_step_so_far_is_in_the_checkpoint(played: Chain, tmp_path: Path) -> None:
    # A rate that breaks the policy later, so that the best step lies before the checkpoint.
    best = {
        "candidate": "best",
        "candidate_every": 2,
        "candidate_prompts": 8,
        "kl_coef": 0.5,
        "target_kl": 9.0,
    }
    ruinous = {"learning_rate": 0.2, "schedule": "constant", "warmup_steps": 60, "kl_budget": 1e9}
    straight, job = (
        policy_update(played, tmp_path / name, **best, **ruinous) for name in ("straight", "killed")
    )
    wanted = run_job(straight)
    killed(job, KILLED_AFTER + 3)  # three of the lines are evaluations: of the start, and after steps 2 and 4
    (checkpoint,) = (Path(job.work) / "checkpoints").glob("[0-9]*")
    assert {path.name for path in checkpoint.glob("best.*")} == {
        "best.policy.safetensors", "best.value.safetensors"
    }  # fmt: skip
    assert run_job(job).outputs == wanted.outputs
    assert numbers(job) == numbers(straight)
    assert wanted.told["metrics"]["policy/candidate_step"] == 2  # type: ignore[index,call-overload]
