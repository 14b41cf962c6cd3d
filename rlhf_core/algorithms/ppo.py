"""Proximal policy optimisation on a language model (Schulman et al., 2017; Ouyang et al., 2022).

Left out here: the pretraining mix (PPO-ptx), adaptive KL and dual clipping.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlhf_core.advantages import gae, token_rewards
from rlhf_core.algorithms.experience import Experience, PromptStream, collect_experience
from rlhf_core.algorithms.invariants import Watch
from rlhf_core.algorithms.monitors import Watcher
from rlhf_core.algorithms.optimize import Diagnostics, Optimizer, Pass, RoleOptimizer, optimize
from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import RolloutBatch
from rlhf_core.generation import Generator, Sampling
from rlhf_core.kl import KLEstimator, kl_per_token
from rlhf_core.losses import ppo_policy_loss, value_loss
from rlhf_core.metrics import MetricSink, WeightedMeans, timed
from rlhf_core.records import Prompt
from rlhf_core.rewards import RewardSource
from rlhf_core.settings import Settings, exact_div
from rlhf_core.tensors import explained_variance, masked_mean, masked_whiten
from rlhf_core.trunk import Trunk


class PPO(Settings):
    """The knobs of PPO."""

    type: Literal["ppo"] = "ppo"
    """The name of this algorithm."""
    num_steps: int = Field(default=12, ge=1)
    """Steps of the stage, each one batch of rollouts; the learning rates' schedules span them."""
    rollouts_per_step: int = Field(default=32, ge=8)
    """Completions sampled in each step; advantages are whitened over all of them."""
    completions_per_prompt: int = Field(default=1, ge=1)
    """Completions of each prompt in a step; a divisor of the rollouts."""
    num_epochs: int = Field(default=2, ge=1, le=8)
    """Times each batch of rollouts is learned from."""
    num_minibatches: int = Field(default=2, ge=1)
    """Optimiser steps an epoch; a divisor of the rollouts."""
    kl_coef: float = Field(default=0.05, ge=0)
    """How much a nat of KL to the reference costs, in units of the normalised reward."""
    kl_estimator: KLEstimator = KLEstimator.K1
    """How one token's KL is estimated for the reward."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """How far the ratio may move before its gain is held."""
    value_clip_range: float | None = Field(default=0.2, gt=0)
    """How far values may move before their gain is held; null switches it off."""
    value_coef: float = Field(default=1.0, gt=0)
    """Scales the critic's loss; with an optimiser of its own it matters to gradient clipping only."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's trade of bias (0) for variance (1)."""
    target_kl: float = Field(default=0.1, gt=0)
    """The epochs of a batch stop when an update's mean approximate KL a token is above this."""
    kl_budget: float = Field(default=12.0, gt=0)
    """The stage stops when the mean KL a completion to the policy it started from is above this, in nats."""
    learning_rate: float = Field(default=2e-4, ge=0, le=1)
    """The policy's peak rate. LoRA wants about 1e-4 where full fine-tuning wants 1e-6: B starts at zero."""
    value_learning_rate: float = Field(default=3e-4, ge=0, le=1)
    """The critic's peak rate."""
    schedule: Literal["constant", "linear"] = "linear"
    """`linear` lets both rates fall to zero over the stage."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which both rates rise from zero."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of each role are scaled down to this norm before every step."""

    @model_validator(mode="after")
    def _divisible(self) -> "PPO":
        exact_div(
            self.rollouts_per_step,
            self.completions_per_prompt,
            "rollouts_per_step over completions_per_prompt",
        )
        exact_div(self.rollouts_per_step, self.num_minibatches, "rollouts_per_step over num_minibatches")
        return self

    def optimizer(self, learning_rate: float) -> Optimizer:
        """The optimiser of one role."""
        return Optimizer(
            learning_rate=learning_rate,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            max_grad_norm=self.max_grad_norm,
        )

    def build(self, sampling: Sampling) -> "PPOAlgorithm":
        """The algorithm with the sampling it learns from."""
        return PPOAlgorithm(self, sampling)


@dataclass(frozen=True)
class PolicyData:
    """What an on-policy algorithm is given."""

    prompts: Sequence[Prompt]
    reward: RewardSource
    generator: Generator
    seed: int
    from_initial: bool
    """The policy starts as the initial policy: then its KL to the reference must start at exactly 0."""
    watched: RewardSource | None = None
    """A score that is logged as `objective/gold` and used for nothing."""
    monitors: Watcher | None = None
    """What looks at every step and may end the stage; it changes nothing else."""


class PPOAlgorithm:
    """PPO on a trunk with the roles policy, value, reference, and start (the policy the stage began with)."""

    def __init__(self, settings: PPO, sampling: Sampling) -> None:
        self.settings = settings
        self.sampling = sampling

    def train(self, trunk: Trunk, data: PolicyData, sink: MetricSink) -> str:
        """Change the roles policy and value; returns why it ended."""
        settings = self.settings
        steps = settings.num_steps * settings.num_epochs * settings.num_minibatches
        optimizers = {
            "policy": RoleOptimizer(trunk, "policy", settings.optimizer(settings.learning_rate), steps),
            "value": RoleOptimizer(trunk, "value", settings.optimizer(settings.value_learning_rate), steps),
        }
        watch = Watch(trunk.device.type, settings.kl_coef)
        for step in range(settings.num_steps):
            times: dict[str, float] = {}
            found = self.experience(step, trunk, data, times)
            watch.experience(step, found, data)
            with timed(times, "time/update_seconds"):
                updates = self.update(step, trunk, found.batch, optimizers, data.seed, watch)
            to_start = self.kl_to_start(trunk, found.batch)
            metrics = {**self.describe(found, to_start), **updates, **times}
            if data.watched is not None:
                metrics["objective/gold"] = float(data.watched.score(found.completions).total.mean())
            alarms = data.monitors.step(step, found, metrics) if data.monitors is not None else []
            if data.monitors is not None:
                metrics["policy/alarms"] = float(data.monitors.num_alarmed)
            sink.log(step, metrics)
            for alarm in alarms:
                sink.alarm(alarm.line)
            sink.progress(
                step + 1,
                settings.num_steps,
                f"reward {metrics['objective/scores']:+.3f}  KL {metrics['objective/kl_sequence']:.2f}",
            )
            if to_start > settings.kl_budget:
                sink.alarm(
                    f"KL to the round's start is {to_start:.2f}, over its budget {settings.kl_budget}: ended"
                )
                return "kl_budget"
            if data.monitors is not None and data.monitors.ended is not None:
                return data.monitors.ended
        return "num_steps"

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
        with timed(times, "time/logprobs_seconds"), trunk.role("value"), torch.no_grad():
            batch.values = trunk.values(batch)
        # 3. score at the last token, minus KL
        batch.kl = kl_per_token(batch.logprobs, batch.ref_logprobs, batch.response_mask, s.kl_estimator)
        batch.rewards = token_rewards(batch.scores, batch.kl, batch.response_mask, s.kl_coef)
        # 4. better than expected?
        advantages, batch.returns = gae(batch.rewards, batch.values, batch.response_mask, s.gamma, s.lam)
        batch.advantages = masked_whiten(advantages, batch.response_mask)
        return found

    def passes(self, trunk: Trunk) -> list[Pass[RolloutBatch]]:
        """What each role minimises."""
        return [
            Pass("policy", partial(self._policy_loss, trunk)),
            Pass("value", partial(self._value_loss, trunk), coef=self.settings.value_coef),
        ]

    def update(
        self,
        step: int,
        trunk: Trunk,
        batch: RolloutBatch,
        optimizers: dict[str, RoleOptimizer],
        seed: int,
        watch: Watch,
    ) -> dict[str, float]:
        """Epochs of clipped updates on one batch, until the update's approximate KL is over its target."""
        s = self.settings
        means, done, first, furthest = WeightedMeans(), 0, True, 0.0
        walk = optimize(
            trunk,
            batch,
            self.passes(trunk),
            optimizers,
            num_epochs=s.num_epochs,
            minibatch_size=exact_div(s.rollouts_per_step, s.num_minibatches, "rollouts over minibatches"),
            seed=derive_seed(seed, "update", step),
        )
        taken: list[dict[str, float]] = []
        for found in walk:
            if first:
                watch.first_minibatch(step, found)
                first = False
            furthest = max(furthest, found["policy/approxkl"])
            if found["policy/approxkl"] > s.target_kl:
                break
            taken.append(found)
            done += 1
        walk.close()
        for found in taken:  # a minibatch that was skipped is counted, and its numbers enter no mean
            means.add({name: value for name, value in found.items() if math.isfinite(value)})
        renamed = {_metric_name(name): value for name, value in means.means().items()}
        return {**renamed, "policy/minibatches": float(done), "policy/approxkl_max": furthest}

    @torch.no_grad()
    def kl_to_start(self, trunk: Trunk, batch: RolloutBatch) -> float:
        """Mean KL a completion, in nats, of the policy that sampled to the policy the stage began with."""
        assert batch.logprobs is not None and batch.ref_logprobs is not None
        start = batch.ref_logprobs
        if "start" in trunk.roles:
            with trunk.role("start"):
                start, _ = trunk.logprobs(batch, self.sampling.temperature)
        return float((batch.logprobs - start).sum(-1).mean())

    def describe(self, found: Experience, to_start: float) -> dict[str, float]:
        """The numbers of a batch; masked means a token, and means a completion where the name says so."""
        b = found.batch
        assert b.kl is not None and b.scores is not None and b.values is not None and b.returns is not None
        penalty = -self.settings.kl_coef * b.kl.sum(-1)
        return {
            "objective/scores": float(b.scores.mean()),
            "objective/kl": float(masked_mean(b.kl, b.response_mask)),
            "objective/kl_sequence": float(b.kl.sum(-1).mean()),
            "objective/kl_to_start": to_start,
            "objective/kl_coef": self.settings.kl_coef,
            "objective/entropy": float(masked_mean(found.entropy, b.response_mask)),
            "objective/non_score_reward": float(penalty.mean()),
            "objective/rlhf_reward": float((b.scores + penalty).mean()),
            "value/explained_variance": float(explained_variance(b.values, b.returns, b.response_mask)),
            "value/mean": float(masked_mean(b.values, b.response_mask)),
            **found.stops(),
            **found.sameness(),
        }

    def _policy_loss(self, trunk: Trunk, part: RolloutBatch, denom: int) -> tuple[Tensor, Diagnostics]:
        assert part.logprobs is not None and part.advantages is not None
        new_logprobs, _ = trunk.logprobs(part, self.sampling.temperature)
        loss, diagnostics = ppo_policy_loss(
            new_logprobs, part.logprobs, part.advantages, part.response_mask, self.settings.clip_range, denom
        )
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


def _metric_name(name: str) -> str:
    """Rates and norms belong to `optim/`, by role."""
    role, _, what = name.partition("/")
    return f"optim/{role}_{what}" if what in ("lr", "grad_norm", "skipped") else name
