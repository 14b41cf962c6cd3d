"""Which step is the candidate: the last, or the best on prompts that the stage never trains on.

What judges is the objective that is optimised, on a slice of the policy's own prompts. No gold is asked and
no prompt of the measurement: choosing by them would show the gates a candidate that was picked to pass. So it
sees a policy that drifted or broke, and not that the reward model itself is wrong: for that, `Slice.reward`
may be a pessimistic source, such as an ensemble's lower bound, and nothing else changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from rlhf_core.algorithms.experience import collect_experience
from rlhf_core.artifacts import derive_seed
from rlhf_core.gates import Estimate
from rlhf_core.generation import Generator, Sampling
from rlhf_core.metrics import Spool, clustered_mean, timed
from rlhf_core.records import Completion, Prompt
from rlhf_core.rewards import RewardSource
from rlhf_core.selection import Evaluation, Rule, Selection
from rlhf_core.settings import Json, Settings
from rlhf_core.trunk import Trunk

Kept = dict[str, dict[str, Tensor]]
"""Weights by role and name, as the trunk holds them."""


class CandidateKnobs(Settings):
    """The knobs of which step is the candidate."""

    candidate: Rule = "last"
    """`last`, or `best`: the step whose gain over the start on held-out prompts has the highest lower end."""
    candidate_every: int = Field(default=5, ge=1)
    """With `best`, steps between two evaluations; the start and the last step are evaluated always."""
    candidate_prompts: int = Field(default=32, ge=8)
    """With `best`, prompts of the policy's pool that are evaluated on and never trained on, at most half."""

    def check_slice(self, num_prompts: int) -> None:
        """Refuse a pool of so many prompts that would have fewer left to train on than to evaluate on."""
        if self.candidate == "best" and 2 * self.candidate_prompts > num_prompts:
            raise ValueError(
                f"candidate_prompts {self.candidate_prompts} of {num_prompts} policy prompts: only "
                f"{max(0, num_prompts - self.candidate_prompts)} would be left to train on, fewer than are "
                "evaluated on. Give more policy prompts, lower candidate_prompts, or set candidate: last."
            )

    def check_choice(self, num_steps: int, warmup: int) -> None:
        """Refuse a stage of so many steps, the first few the critic's alone, with nothing to choose."""
        first = (warmup // self.candidate_every + 1) * self.candidate_every
        if self.candidate == "best" and first >= num_steps:
            raise ValueError(
                f"candidate_every {self.candidate_every} of num_steps {num_steps}, of which the critic warms "
                f"up in {warmup}: only the last step would be evaluated, and `best` could choose no other. "
                "Lower candidate_every, or set candidate: last."
            )

    def set_aside(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
        """The slice, by the prompts' ids alone and so the same in every round; and the rest in its order."""
        self.check_slice(len(prompts))
        ordered = sorted(prompts, key=lambda prompt: (derive_seed("candidate", prompt.id), prompt.id))
        held_out = ordered[: self.candidate_prompts]
        ids = {prompt.id for prompt in held_out}
        return held_out, [prompt for prompt in prompts if prompt.id not in ids]


@dataclass(frozen=True)
class Slice:
    """Held-out prompts, and what the policy's answers to them are judged by."""

    prompts: Sequence[Prompt]
    reward: RewardSource
    shape: Callable[[Tensor, Sequence[Completion]], Tensor]
    """[B] scores to what is learned from."""
    kl_coef: float
    """What a nat costs, as it is set: one that is steered would judge each step by another measure."""
    reference: str
    """The role that KL is measured to; one that does not move while the stage runs."""
    generator: Generator
    sampling: Sampling
    seed: int

    def measure(self, trunk: Trunk) -> tuple[list[float], list[float]]:
        """Of each prompt's one completion: shaped score, and summed log pi / pi_ref in nats (k1, unbiased).

        The same random numbers every time, so that two policies differ by nothing else.
        """
        found = collect_experience(
            trunk, self.generator, self.prompts, 1, self.reward, self.sampling, self.seed, {}, self.reference
        )
        batch = found.batch
        assert batch.scores is not None and batch.logprobs is not None and batch.ref_logprobs is not None
        log_ratio = (batch.logprobs - batch.ref_logprobs).sum(-1)
        return self.shape(batch.scores, found.completions).tolist(), log_ratio.tolist()


class BestStep:
    """Evaluates the policy now and then, and keeps the weights of the best.

    An evaluation is as good as the lower end of the 95 % interval of its paired gain over the start: a step
    that is better on average by a few lucky prompts is not chosen for it. Of equal ones it is the earlier,
    which moved less; the start itself is no candidate. The highest of several lower ends is itself a little
    too good, and no measurement: the gates judge on other prompts.
    """

    def __init__(self, held_out: Slice, every: int, warmup: int) -> None:
        self.slice = held_out
        self.every = every
        self.warmup = warmup
        self.evaluations: list[Evaluation] = []
        self._start: list[float] = []
        self._kept: Kept = {}

    @property
    def best(self) -> Evaluation | None:
        """The best so far, the start left out; the first of equal ones."""
        later = [one for one in self.evaluations if one.step > 0]
        return max(later, key=lambda one: one.gain.low) if later else None

    def due(self, step: int, ended: bool) -> bool:
        """Whether to evaluate after so many steps; while the critic warms up, the policy is the start."""
        return ended or (step > self.warmup and step % self.every == 0)

    @torch.no_grad()
    def evaluate(self, step: int, trunk: Trunk, roles: Sequence[str], sink: Spool) -> None:
        """Judge the policy after so many steps; keep the weights of these roles if none was better."""
        times: dict[str, float] = {}
        with timed(times, "time/slice_seconds"):
            rewards, kl = self.slice.measure(trunk)
        objective = [r - self.slice.kl_coef * nats for r, nats in zip(rewards, kl, strict=True)]
        self._start = self._start or objective
        gains = [now - before for now, before in zip(objective, self._start, strict=True)]
        ids = [prompt.id for prompt in self.slice.prompts]
        found = Evaluation(
            step=step,
            reward=_mean(rewards),
            kl=_mean(kl),
            objective=_mean(objective),
            gain=Estimate.of(clustered_mean(gains, ids, seed=derive_seed(self.slice.seed, "bootstrap"))),
        )
        self.evaluations.append(found)
        if found is self.best:
            self._kept = {role: _copied(trunk.parameters(role)) for role in roles}
        sink.log(step, {**_metrics(found), **times})

    def choose(self, steps: int, trunk: Trunk, sink: Spool) -> Selection:
        """Put the best step's weights back, after so many steps in all; the critic's are of the same step.

        A critic tells the return of one policy: that of the last step would belong to no policy that is kept.
        """
        best = self.best
        assert best is not None
        with torch.no_grad():
            for role, weights in self._kept.items():
                for name, parameter in trunk.parameters(role).items():
                    parameter.copy_(weights[name])
        if best.gain.low <= 0:
            sink.alarm(
                "candidate: after no step was the policy shown to be better than the one it started from, "
                f"on {len(self.slice.prompts)} held-out prompts (the best, after {best.step} of {steps}: "
                f"{best.spoken}): what it earned did not pay for its KL, or the prompts are too few to show "
                "it. Lower `learning_rate`, or raise `num_steps` or `candidate_prompts`."
            )
        return Selection(
            rule="best",
            step=best.step,
            steps=steps,
            why=self._why(best, steps),
            kl_coef=self.slice.kl_coef,
            prompts=tuple(prompt.id for prompt in self.slice.prompts),
            evaluations=tuple(self.evaluations),
        )

    def state(self) -> dict[str, Json]:
        """What was found so far, but for the weights."""
        found: list[Json] = [one.to_json() for one in self.evaluations]
        return {"start": list(self._start), "evaluations": found, "kept": list(self._kept)}

    def kept(self) -> Kept:
        """The best step's weights by role; empty before the first evaluation after the start."""
        return self._kept

    def load_state(self, state: Mapping[str, Json], tensors: Callable[[str], dict[str, Tensor]]) -> None:
        """Go on where `state` was taken; `tensors` gives what `kept` had of a role."""
        self._start = [float(str(value)) for value in cast(list[Json], state["start"])]
        found = cast(list[Json], state["evaluations"])
        self.evaluations = [Evaluation.model_validate(one) for one in found]
        self._kept = {str(role): tensors(str(role)) for role in cast(list[Json], state["kept"])}

    def _why(self, best: Evaluation, steps: int) -> str:
        tried = len(self.evaluations) - 1
        found = (
            f"The candidate is the policy after {best.step} of {steps} steps: of {tried} evaluated on "
            f"{len(self.slice.prompts)} held-out prompts it has the highest lower end of its gain over the "
            f"start ({best.spoken})"
        )
        if best.gain.low > 0:
            return f"{found}."
        return f"{found}, and not even that is above 0: none was shown to be better than the start."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory, out of the way of training."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


def _metrics(found: Evaluation) -> dict[str, float]:
    return {
        "objective/slice_reward": found.reward,
        "objective/slice_kl": found.kl,
        "objective/slice_gain": found.gain.value,
        "objective/slice_gain_low": found.gain.low,
        "objective/slice_gain_high": found.gain.high,
    }
