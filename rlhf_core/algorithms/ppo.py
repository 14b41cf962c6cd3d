"""Proximal policy optimisation on a language model (Schulman et al., 2017; Ouyang et al., 2022)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlhf_core.advantages import gae, token_rewards, token_scores
from rlhf_core.algorithms.candidate import BestStep, Slice
from rlhf_core.algorithms.critic import CriticKnobs
from rlhf_core.algorithms.experience import Experience, PromptStream, collect_experience
from rlhf_core.algorithms.invariants import Watch
from rlhf_core.algorithms.kl_control import KLController, KLKnobs
from rlhf_core.algorithms.on_policy import OnPolicyKnobs, PolicyData, Trained, run_steps
from rlhf_core.algorithms.optimize import Diagnostics, Pass, RoleOptimizer, optimize
from rlhf_core.algorithms.pretraining import PretrainingMix, PtxKnobs
from rlhf_core.algorithms.shaping import ShapingKnobs
from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import RolloutBatch
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.generation import Sampling
from rlhf_core.kl import kl_per_token
from rlhf_core.losses import ppo_policy_loss, value_loss
from rlhf_core.metrics import Spool, WeightedMeans, timed
from rlhf_core.selection import last_step
from rlhf_core.settings import Json, exact_div
from rlhf_core.tensors import explained_variance, masked_mean, masked_sum, masked_whiten
from rlhf_core.trunk import Trunk


class PPO(OnPolicyKnobs, KLKnobs, ShapingKnobs, CriticKnobs, PtxKnobs):
    """The knobs of PPO; those of loop, KL, score, critic and pretraining mix stand where they are used."""

    type: Literal["ppo"] = "ppo"
    """The name of this algorithm."""
    num_epochs: int = Field(default=2, ge=1, le=8)
    """Times each batch of rollouts is learned from."""
    num_minibatches: int = Field(default=2, ge=1)
    """Optimiser steps an epoch; a divisor of the rollouts."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """How far the ratio may move before its gain is held."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token of negative advantage by this times the advantage; null does not."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """How much a nat of entropy a token earns in the loss; KL to the reference is what keeps a language model
    varied, so 0 is usual."""
    whiten_advantages: bool = True
    """Advantages are shifted to mean 0 and scaled to deviation 1 over the whole batch of rollouts."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's trade of bias (0) for variance (1)."""
    target_kl: float = Field(default=0.1, gt=0)
    """The epochs of a batch stop when an update's mean approximate KL a token is above this."""

    @model_validator(mode="after")
    def _consistent(self) -> "PPO":
        exact_div(self.rollouts_per_step, self.num_minibatches, "rollouts_per_step over num_minibatches")
        if self.kl_target is not None and self.kl_horizon < self.rollouts_per_step:
            raise ValueError(
                f"kl_horizon {self.kl_horizon} is less than the {self.rollouts_per_step} rollouts of a step: "
                "the coefficient would jump. Use a multiple of the rollouts."
            )
        if self.critic_warmup_steps >= self.num_steps:
            raise ValueError(
                f"critic_warmup_steps {self.critic_warmup_steps} of num_steps {self.num_steps}: the policy "
                "would never learn. Leave it steps of its own."
            )
        self.check_choice(self.num_steps, self.critic_warmup_steps)
        return self

    def build(self, sampling: Sampling) -> "PPOAlgorithm":
        """The algorithm with the sampling it learns from."""
        return PPOAlgorithm(self, sampling)


class PPOAlgorithm:
    """PPO on a trunk with the roles policy, value, reference, and start (the policy the stage began with)."""

    def __init__(self, settings: PPO, sampling: Sampling) -> None:
        self.settings = settings
        self.sampling = sampling
        self.kl = KLController(settings)
        self.mix: PretrainingMix | None = None
        self.kl_budget = settings.kl_budget

    def train(
        self, trunk: Trunk, data: PolicyData, sink: Spool, checkpoints: Checkpoints | None = None
    ) -> Trained:
        """Change the roles policy and value."""
        s = self.settings
        an_update = s.num_epochs * s.num_minibatches
        policy_steps = max(1, s.num_steps - s.critic_warmup_steps) * an_update
        optimizers = {
            "policy": RoleOptimizer(trunk, "policy", s.optimizer(s.learning_rate), policy_steps),
        }
        if s.critic_role == "value":
            value = s.optimizer(s.value_learning_rate)
            optimizers["value"] = RoleOptimizer(trunk, "value", value, s.num_steps * an_update)
        self.mix = s.mix(trunk, data.texts, data.seed)
        before = self.mix.held_out(trunk, "before") if self.mix else {}
        watch = Watch(trunk.device.type)
        best, rest = self.candidates(data)
        ended = run_steps(self, trunk, rest, optimizers, s.num_steps, watch, sink, checkpoints, best)
        selection = best.choose(ended.steps, trunk, sink) if best else last_step(ended.steps)
        after = self.mix.held_out(trunk, "after") if self.mix else {}
        return Trained(ended.why, selection, {**before, **after})

    def candidates(self, data: PolicyData) -> tuple[BestStep | None, PolicyData]:
        """What chooses the candidate, if there is a choice, and the data that is left to train on."""
        s = self.settings
        if s.candidate == "last":
            return None, data
        prompts, rest = s.set_aside(data.prompts)
        held_out = Slice(
            prompts,
            data.reward,
            s.shape,
            s.kl_coef or s.kl_loss_coef,
            "start" if s.refresh_steps else "reference",  # a reference that moves is no measure
            data.generator,
            self.sampling,
            derive_seed(data.seed, "candidate"),
        )
        return BestStep(held_out, s.candidate_every, s.critic_warmup_steps), replace(data, prompts=rest)

    def experience(self, step: int, trunk: Trunk, data: PolicyData, times: dict[str, float]) -> Experience:
        """The batch of a step: a pure function of the step and the weights."""
        s = self.settings
        stream = PromptStream(data.prompts, data.seed, s.rollouts_per_step, s.completions_per_prompt)
        # 1. sample, score, log-probabilities
        found = collect_experience(
            trunk,
            data.generator,
            stream.step(step),
            s.completions_per_prompt,
            data.reward,
            self.sampling,
            derive_seed(data.seed, "step", step),
            times,
        )
        batch = found.batch
        assert batch.logprobs is not None and batch.ref_logprobs is not None and batch.scores is not None
        # 2. what was expected
        with timed(times, "time/logprobs_seconds"), trunk.role(s.critic_role), torch.no_grad():
            batch.values = trunk.values(batch)
        # 3. the score where it is earned, at the last token unless its source says otherwise, minus KL
        mask = batch.response_mask
        shaped = s.shape(batch.scores, found.completions)
        batch.token_scores = token_scores(shaped, found.per_token, mask)
        batch.kl = kl_per_token(batch.logprobs, batch.ref_logprobs, mask, s.kl_estimator)
        batch.rewards = token_rewards(batch.token_scores, batch.kl, mask, self.kl.in_reward)
        if s.whiten_rewards:
            batch.rewards = masked_whiten(batch.rewards, mask, shift_mean=False)
        # 4. better than expected?
        advantages, batch.returns = gae(batch.rewards, batch.values, mask, s.gamma, s.lam)
        batch.advantages = masked_whiten(advantages, mask) if s.whiten_advantages else advantages
        return found

    def passes(self, step: int, trunk: Trunk) -> list[Pass[RolloutBatch]]:
        """What each role minimises; while the critic warms up, the policy has no pass."""
        s = self.settings
        value = Pass(s.critic_role, partial(self._value_loss, trunk), coef=s.value_coef, name="value")
        if step < s.critic_warmup_steps:
            return [value]
        found = [Pass("policy", partial(self._policy_loss, trunk)), value]
        if self.mix:
            found.append(self.mix.learned_from(trunk, step * s.num_epochs * s.num_minibatches))
        return found

    def update(
        self,
        step: int,
        trunk: Trunk,
        found: Experience,
        optimizers: Mapping[str, RoleOptimizer],
        seed: int,
        watch: Watch,
    ) -> dict[str, float]:
        """Epochs of clipped updates on one batch, until the update's approximate KL is over its target."""
        s = self.settings
        means, done, furthest = WeightedMeans(), 0, 0.0
        warming = step < s.critic_warmup_steps
        walk = optimize(
            trunk,
            found.batch,
            self.passes(step, trunk),
            optimizers,
            num_epochs=s.num_epochs,
            minibatch_size=exact_div(s.rollouts_per_step, s.num_minibatches, "rollouts over minibatches"),
            seed=derive_seed(seed, "update", step),
        )
        taken: list[dict[str, float]] = []
        for minibatch in walk:
            if not warming and not taken:
                watch.first_minibatch(step, minibatch)
            furthest = max(furthest, minibatch.get("policy/approxkl", 0.0))
            if minibatch.get("policy/approxkl", 0.0) > s.target_kl:
                break
            taken.append(minibatch)
            done += 1
        walk.close()
        for minibatch in taken:  # one that was skipped is counted, and its numbers enter no mean
            means.add({name: value for name, value in minibatch.items() if math.isfinite(value)})
        self.kl.update(_log_ratio(found.batch), len(found.batch))
        renamed = {_metric_name(name): value for name, value in means.means().items()}
        if warming:
            return {**renamed, "policy/minibatches": 0.0}
        return {**renamed, "policy/minibatches": float(done), "policy/approxkl_max": furthest}

    def settle(self, step: int, trunk: Trunk) -> None:
        """The reference may move."""
        self.settings.refresh(step, trunk)

    def state(self) -> dict[str, Json]:
        """The KL coefficient."""
        return self.kl.state()

    def load_state(self, state: dict[str, Json]) -> None:
        """Go on where `state` was taken."""
        self.kl.load_state(state)

    @torch.no_grad()
    def kl_to_start(self, trunk: Trunk, batch: RolloutBatch) -> float:
        """Mean KL a completion, in nats, of the policy that sampled to the policy the stage began with."""
        assert batch.logprobs is not None and batch.ref_logprobs is not None
        start = batch.ref_logprobs
        if "start" in trunk.roles:
            with trunk.role("start"):
                start, _ = trunk.logprobs(batch, self.sampling.temperature)
        return float((batch.logprobs - start).sum(-1).mean())

    def describe(self, trunk: Trunk, found: Experience) -> dict[str, float]:
        """The numbers of a batch; masked means a token, and means a completion where the name says so."""
        b = found.batch
        assert b.kl is not None and b.scores is not None and b.values is not None and b.returns is not None
        assert b.token_scores is not None
        penalty = -self.kl.in_reward * b.kl.sum(-1)
        return {
            "objective/scores": float(b.scores.mean()),
            "objective/shaped_scores": float(b.token_scores.sum(-1).mean()),
            "objective/kl": float(masked_mean(b.kl, b.response_mask)),
            "objective/kl_sequence": float(b.kl.sum(-1).mean()),
            "objective/kl_to_start": self.kl_to_start(trunk, b),
            "objective/kl_coef": self.kl.coef,
            "objective/entropy": float(masked_mean(found.entropy, b.response_mask)),
            "objective/non_score_reward": float(penalty.mean()),
            "objective/rlhf_reward": float((b.token_scores.sum(-1) + penalty).mean()),
            "value/explained_variance": float(explained_variance(b.values, b.returns, b.response_mask)),
            "value/mean": float(masked_mean(b.values, b.response_mask)),
            **found.stops(),
            **found.sameness(),
        }

    def _policy_loss(self, trunk: Trunk, part: RolloutBatch, denom: int) -> tuple[Tensor, Diagnostics]:
        assert part.logprobs is not None and part.ref_logprobs is not None and part.advantages is not None
        s, mask = self.settings, part.response_mask
        new_logprobs, entropy = trunk.logprobs(part, self.sampling.temperature, s.entropy_coef > 0)
        loss, diagnostics = ppo_policy_loss(
            new_logprobs, part.logprobs, part.advantages, mask, s.clip_range, denom, s.dual_clip
        )
        if self.kl.in_loss:
            kl = kl_per_token(new_logprobs, part.ref_logprobs, mask, s.kl_estimator).sum()
            loss, diagnostics["kl_loss"] = loss + self.kl.in_loss * kl / denom, kl.detach()
        if entropy is not None:
            loss = loss - s.entropy_coef * masked_sum(entropy, mask) / denom
        drift = (new_logprobs.detach() - part.logprobs).abs().max()
        return loss, {**diagnostics, "max_log_ratio": drift}

    def _value_loss(self, trunk: Trunk, part: RolloutBatch, denom: int) -> tuple[Tensor, Diagnostics]:
        assert part.values is not None and part.returns is not None
        return value_loss(
            trunk.values(part),
            part.values,
            part.returns,
            part.response_mask,
            self.settings.value_clip_range,
            denom,
        )


def _log_ratio(batch: RolloutBatch) -> float:
    """Mean over completions of the summed log ratio to the reference; what steers the coefficient."""
    assert batch.logprobs is not None and batch.ref_logprobs is not None
    return float((batch.logprobs - batch.ref_logprobs).sum(-1).mean())


def _metric_name(name: str) -> str:
    """Rates and norms belong to `optim/`, by role."""
    role, _, what = name.partition("/")
    return f"optim/{role}_{what}" if what in ("lr", "grad_norm", "skipped") else name
