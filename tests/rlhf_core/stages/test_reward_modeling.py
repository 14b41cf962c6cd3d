"""The reward model: fresh, normalised on the reference policy's samples, blind to held-out labels."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms.optimize import Optimizer
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.metrics import read_lines
from rlhf_core.records import Choice, Completion
from rlhf_core.rewards.model import ModelReward
from rlhf_core.sources import read_rows
from rlhf_core.stages import run_job
from rlhf_core.stages.labels import LabelledGroup, is_held_out, to_batch
from rlhf_core.stages.reward_modeling import RewardModeling, normalise, probe
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import Chain, completion, label

SHARE = 0.25
SETTINGS = RewardModeling(
    lora=Lora(rank=4, alpha=8),
    optimizer=Optimizer(learning_rate=5e-3),
    num_epochs=3,
    prompts_per_minibatch=4,
    held_out_share=SHARE,
)
PROMPTS = [f"p{n}" for n in range(32)]
COMPLETIONS = [
    completion(prompt, k, f"{'az'[k]}{'bcde'[n % 4]}" + "az"[k] * (2 + n % 3))
    for n, prompt in enumerate(PROMPTS)
    for k in range(2)
]


@pytest.fixture
def chain(played: Chain) -> Chain:
    """A chain that goes on from the played round's trunk."""
    return Chain(played.root, played.execution)


def trained(
    chain: Chain, played: Chain, lies_about: Callable[[str], bool] = lambda prompt: False
) -> tuple[ArtifactRef, Path]:
    """A reward model of labels that like a over z, but for the prompts that are lied about; and its spool."""
    labels = [label(p, 0, 1, Choice.B if lies_about(p) else Choice.A) for p in PROMPTS]
    pool = chain.rows({"preferences": labels, "completions": COMPLETIONS}, "preferences")
    inputs = {"trunk": played.made["bootstrap"]["trunk"], "preferences.0001": pool}
    made = chain.run("reward_modeling", SETTINGS, inputs)["reward_model"]
    return made, Path(chain.jobs["reward_modeling"].work) / "metrics.jsonl"


def loaded(played: Chain, folder: Path) -> Trunk:
    """The trunk of the played round with a reward model read from its files."""
    trunk = played.trunk()
    trunk.load_role("reward", folder)
    return trunk


def test_separable_labels_are_learned(chain: Chain, played: Chain) -> None:
    ref, spool = trained(chain, played)
    steps = [m for line in read_lines(spool) if "reward_model/train_loss" in (m := line["metrics"])]
    num_train = sum(not is_held_out(prompt, SHARE) for prompt in PROMPTS)
    assert len(steps) == 3 * (num_train // 4)
    assert [step["reward_model/train_accuracy"] for step in steps[-3:]] == [1, 1, 1]
    # The probe has learned most of it before the adapter's first step, which is a gain all the same.
    assert steps[-1]["reward_model/train_loss"] < steps[0]["reward_model/train_loss"] < 0.2
    # What it has never seen follows the same rule.
    scores = ModelReward(loaded(played, chain.open(ref))).score(COMPLETIONS).total.view(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).all()


def test_the_probe_is_the_minimum_of_its_objective(played: Chain) -> None:
    trunk = played.trunk()
    trunk.add_role("reward", Lora(rank=2), 1, head="last")
    groups = [LabelledGroup(p, 1, COMPLETIONS[2 * n : 2 * n + 2], [(0, 1)], 0) for n, p in enumerate(PROMPTS)]
    batch = to_batch(groups, trunk.codec.pad_id, trunk.device)
    decay = 0.3
    probe(trunk, batch, decay)
    head = trunk.heads["reward"]
    with torch.no_grad(), trunk.role("reward"):
        states = trunk.pooled_states(batch.completions)
    deviation = states.std(0) + 1e-6
    x = ((states - states.mean(0)) / deviation)[batch.chosen] - ((states - states.mean(0)) / deviation)[
        batch.rejected
    ]
    w = head.weight.detach() * deviation
    # The gradient, by hand: -mean of sigmoid(-w.x) x, plus decay w; zero at the one minimum.
    gradient = -(torch.sigmoid(-x @ w)[:, None] * x).mean(0) + decay * w
    assert gradient.abs().max() < 1e-4 < w.abs().max()
    # The bias centres the scores, which the pairs cannot tell.
    assert abs(float(head(states).mean())) < 1e-4


def test_held_out_labels_train_nothing(chain: Chain, played: Chain) -> None:
    honest, _ = trained(chain, played)
    held_out = [prompt for prompt in PROMPTS if is_held_out(prompt, SHARE)]
    assert 0 < len(held_out) < len(PROMPTS)
    poisoned, _ = trained(chain, played, lambda prompt: prompt in held_out)
    assert poisoned.digest == honest.digest
    turned, _ = trained(chain, played, lambda prompt: prompt == next(p for p in PROMPTS if p not in held_out))
    assert turned.digest != honest.digest


def test_reference_samples_score_zero_on_average_with_deviation_one(played: Chain) -> None:
    trunk = loaded(played, played.open(played.made["reward_modeling"]["reward_model"]))
    folder = played.open(played.made["preferences"]["preferences"])
    scores = ModelReward(trunk).score(read_rows(folder / "completions.parquet", Completion)).total
    assert len(scores) == 32 * 4
    assert scores.mean().item() == pytest.approx(0, abs=1e-4)
    assert scores.std().item() == pytest.approx(1, rel=1e-4)


def test_a_round_trains_on_the_labels_of_all_rounds(chain: Chain, played: Chain) -> None:
    first = played.made["preferences"]["preferences"]
    labels = [label(p, 0, 1, Choice.A, round=2) for p in PROMPTS]
    second = chain.rows({"preferences": labels, "completions": COMPLETIONS}, "preferences")
    inputs = {"trunk": played.made["bootstrap"]["trunk"], "preferences.0001": first}
    chain.run("reward_modeling", SETTINGS, {**inputs, "preferences.0002": second})
    told = [
        run_job(job).told["metrics"]
        for job in (played.jobs["reward_modeling"], chain.jobs["reward_modeling"])
    ]
    before, after = (metrics["reward_model/train_prompts"] for metrics in told)
    assert after == before + sum(not is_held_out(prompt, SHARE) for prompt in PROMPTS)


def test_a_reward_model_that_tells_nothing_apart_is_refused(make_trunk: Callable[..., Trunk]) -> None:
    trunk = make_trunk()
    trunk.add_role("reward", Lora(rank=2), 0, head="last")
    with pytest.raises(ValueError, match="7 reference samples: too few"):
        normalise(trunk, COMPLETIONS[:7])
    with torch.no_grad():
        trunk.heads["reward"].weight.zero_()
    with pytest.raises(ValueError, match="the same score: it learned nothing"):
        normalise(trunk, COMPLETIONS)
