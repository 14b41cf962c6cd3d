"""PPO solves on the tiny model what can be solved: a token to count, a pattern, with KL under its budget."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import TinyModel
from rlhf_core.records import Prompt
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.rewards.verifier import RegexMatch
from rlhf_core.trunk import Lora, Trunk

PROMPT = Prompt(id="p", text="A")
FAST = PPO(
    num_steps=5,
    rollouts_per_step=128,
    kl_coef=0.02,
    target_kl=0.3,
    learning_rate=1e-2,
    value_learning_rate=2e-2,
    schedule="constant",
)


@pytest.fixture
def make_learner(make_trunk: Callable[..., Trunk]) -> Callable[[int], Trunk]:
    """Makes a trunk with a fresh policy and a critic that expects nothing."""

    def make(seed: int) -> Trunk:
        # The output layer is frozen, and the last state has length sqrt(H): of 32 numbers no logit could be
        # large enough to be sure of a token.
        tiny = TinyModel(hidden_size=64, num_layers=2, seed=seed)
        trunk = make_trunk(model=tiny, bucket=32, micro_batch_tokens=8192)
        for role in ("policy", "value"):
            trunk.add_role(role, Lora(rank=8, alpha=32.0), seed, head="last" if role == "value" else None)
        trunk.heads["value"].weight.data.zero_()  # a random critic is noise in the first advantages
        return trunk

    return make


@torch.no_grad()
def likely_letters(trunk: Trunk) -> list[str]:
    """The printable letters that the reference may answer with, the likeliest first."""
    with trunk.role("reference"):
        ids = torch.tensor([trunk.codec.encode_prompt(PROMPT)])
        order = trunk.model(input_ids=ids).logits[0, -1].argsort(descending=True).tolist()
    return [text for token in order if len(text := trunk.codec.decode([token])) == 1 and " " < text <= "~"]


def count_a_token(letters: list[str]) -> PerCompletion:
    return RegexMatch(pattern=re.escape(letters[0]), mode="count").build()


def match_a_pattern(letters: list[str]) -> PerCompletion:
    return RegexMatch(pattern=f"[{re.escape(''.join(letters[:3]))}]").build()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("task", "first", "solved"), [(count_a_token, 0.3, 1.8), (match_a_pattern, 0.4, 0.9)]
)
def test_a_task_is_solved_with_kl_under_its_budget(
    make_learner: Callable[[int], Trunk],
    tmp_path: Path,
    task: Callable[[list[str]], PerCompletion],
    first: float,
    solved: float,
    seed: int,
) -> None:
    # Of two tokens: a count of 2 is the most, and a pattern is matched or not.
    trunk, sink = make_learner(seed), Spool(tmp_path)
    reward = task(likely_letters(trunk))
    given = {"prompts": [PROMPT], "reward": reward, "generator": HFGenerator(), "seed": seed}
    data = PolicyData(**given, from_reference=True)  # type: ignore[arg-type]
    sampling = Sampling(max_new_tokens=2, batch_size=FAST.rollouts_per_step)
    PPOAlgorithm(FAST, sampling).train(trunk, data, sink)
    logged = [line["metrics"] for line in read_lines(sink.metrics_path)]
    scores, kl = ([m[f"objective/{name}"] for m in logged] for name in ("scores", "kl_sequence"))  # type: ignore[index]
    assert len(logged) == FAST.num_steps  # a budget that was passed would have ended the run
    assert max(kl) < FAST.kl_budget and sink.alarms == []
    assert scores[0] < first
    assert sum(scores[-2:]) / 2 > solved
