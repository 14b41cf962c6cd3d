"""A round with `bootstrap.weights: full`: every stage is the same, and each role has weights of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.metrics import read_lines
from rlhf_core.settings import Execution
from rlhf_core.stages import run_job
from rlhf_core.stages.bootstrap import Bootstrap, resolve
from tests.rlhf_core.stages.chain import Chain, play
from tests.rlhf_core.stages.test_stages import MADE, again, elsewhere

FULL = (
    "bootstrap.weights=full",
    "reward_model.optimizer.learning_rate=1.0e-3",
    "policy_update.algorithm={learning_rate: 1.0e-3, value_learning_rate: 1.0e-3}",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The tiny round, every role with weights of its own."""
    chain = Chain(tmp_path_factory.mktemp("full"))
    play(chain, *FULL)
    return chain


def logged(chain: Chain, stage: str, name: str) -> list[float]:
    lines = read_lines(Path(chain.jobs[stage].work) / "metrics.jsonl")
    return [metrics[name] for line in lines if name in (metrics := line["metrics"])]  # type: ignore[operator, index]


def files(chain: Chain, stage: str, role: str) -> dict[str, torch.Tensor]:
    return load_file(chain.open(chain.made[stage][role]) / "weights.safetensors")


def test_every_stage_makes_what_it_makes_with_adapters(full: Chain) -> None:
    assert {shown: {r: ref.kind for r, ref in refs.items()} for shown, refs in full.made.items()} == MADE
    told = {"artifact.json", "role.json", "weights.safetensors"}
    for stage, role, wanted in (
        ("policy_update", "policy", told),
        ("policy_update", "critic", {*told, "head.safetensors"}),
        ("reward_modeling", "reward_model", {*told, "head.safetensors"}),
    ):
        assert {path.name for path in full.open(full.made[stage][role]).iterdir()} == wanted


def test_the_first_policy_is_the_trunk_and_the_candidate_is_not(full: Chain) -> None:
    assert files(full, "bootstrap", "policy") == {}
    trunk = full.trunk()
    for stage, name in (("bootstrap", "start"), ("policy_update", "candidate")):
        trunk.load_role(name, full.open(full.made[stage]["policy"]))
    assert trunk.is_initial("start") and not trunk.is_initial("candidate")
    # Every tensor was trained: PPO reaches all of them through the log-probabilities.
    assert files(full, "policy_update", "policy").keys() == trunk.parameters("candidate").keys()


def test_the_first_step_is_at_a_ratio_of_1_and_a_kl_of_0_to_the_bit(full: Chain) -> None:
    assert logged(full, "policy_update", "objective/kl_sequence")[0] == 0
    assert logged(full, "policy_update", "objective/kl_sequence")[1] != 0
    alarms = run_job(full.jobs["policy_update"]).told["alarms"]
    assert alarms == []


def test_the_reward_model_learns_with_its_weights(full: Chain) -> None:
    job = full.jobs["reward_modeling"]
    longer = job.model_copy(
        update={"settings": {**job.settings, "num_epochs": 4}, "work": f"{job.work}-longer"}
    )
    made = run_job(longer).outputs["reward_model"]
    lines = read_lines(Path(longer.work) / "metrics.jsonl")
    losses = [
        m["reward_model/train_loss"] for line in lines if "reward_model/train_loss" in (m := line["metrics"])
    ]
    epoch = len(losses) // 4
    # The probe has learned what a head can before the first step: this is what the weights add.
    assert sum(losses[-epoch:]) < 0.9 * sum(losses[:epoch])
    assert len(load_file(full.open(made) / "weights.safetensors")) > 10


def test_a_probe_alone_moves_the_head_and_no_weight(full: Chain) -> None:
    job = full.jobs["reward_modeling"]
    done = run_job(
        job.model_copy(update={"settings": {**job.settings, "num_epochs": 0}, "work": f"{job.work}-probe"})
    )
    folder = full.open(done.outputs["reward_model"])
    assert load_file(folder / "weights.safetensors") == {}
    assert load_file(folder / "head.safetensors")["weight"].any()


def test_a_later_round_starts_from_the_candidate_and_its_kl_to_the_start_is_0(full: Chain) -> None:
    job = full.jobs["policy_update"]
    inputs = {**job.inputs, "policy": full.made["policy_update"]["policy"]}
    later = job.model_copy(update={"inputs": inputs, "work": f"{job.work}-later"})
    run_job(later)
    lines = [line["metrics"] for line in read_lines(Path(later.work) / "metrics.jsonl")]
    first = next(metrics for metrics in lines if "objective/kl_to_start" in metrics)  # type: ignore[operator]
    assert first["objective/kl_to_start"] == 0 and first["objective/kl_sequence"] != 0  # type: ignore[index]


def test_the_same_job_gives_the_same_digests(full: Chain, tmp_path: Path) -> None:
    chain = elsewhere(full, tmp_path, full.execution)
    for shown in ("bootstrap", "reward_modeling", "policy_update"):
        assert again(full, chain, shown) == {r: ref.digest for r, ref in full.made[shown].items()}


def test_the_trunk_says_which_weights_its_roles_have_and_one_of_adapters_says_nothing_new(
    full: Chain, played: Chain
) -> None:
    said = {
        name: json.loads((chain.open(chain.made["bootstrap"]["trunk"]) / "trunk.json").read_text())
        for name, chain in (("full", full), ("lora", played))
    }
    assert said["lora"] == {"dtype": "float32", "length_bucket": 32}
    assert said["full"] == {**said["lora"], "weights": "full"}


def test_a_role_of_a_project_with_adapters_is_refused(full: Chain, played: Chain) -> None:
    job = full.jobs["policy_update"]
    candidate = played.made["policy_update"]["policy"]
    shutil.copytree(
        played.open(candidate), full.store.root / "objects" / candidate.digest, dirs_exist_ok=True
    )
    wrong = job.model_copy(
        update={"inputs": {**job.inputs, "policy": candidate}, "work": f"{job.work}-wrong"}
    )
    with pytest.raises(
        ValueError, match="trained with `weights: lora`, and this trunk's roles are `weights: full`"
    ):
        run_job(wrong)


def test_auto_gives_own_weights_a_dtype_that_holds_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    on = Execution(device="cuda")
    assert resolve(Bootstrap(), on)[0].dtype == "bfloat16"
    assert resolve(Bootstrap(weights="full"), on)[0].dtype == "float32"
    assert resolve(Bootstrap(weights="full", dtype="bfloat16"), on)[0].dtype == "bfloat16"
