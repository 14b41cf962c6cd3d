"""The loop of every on-policy algorithm: experience, update, numbers, checks, checkpoint, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, cast

import torch
from pydantic import Field, model_validator

from rlhf_core.algorithms.candidate import BestStep, CandidateKnobs
from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.invariants import Watch
from rlhf_core.algorithms.looks import is_looked_at, looks
from rlhf_core.algorithms.monitors import Watcher
from rlhf_core.algorithms.optimize import Optimizer, RoleOptimizer, Schedule
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.generation import Generator
from rlhf_core.metrics import Spool, timed
from rlhf_core.records import Prompt
from rlhf_core.rewards import RewardSource
from rlhf_core.selection import Selection
from rlhf_core.settings import Json, exact_div
from rlhf_core.trunk import Trunk

REFERENCE = "reference"
BEST = "best."
"""What the checkpoint's files of the best step's roles begin with."""


class OnPolicyKnobs(CandidateKnobs):
    """The knobs of the loop, of every on-policy algorithm."""

    num_steps: int = Field(default=12, ge=1)
    """Steps of the stage, each one batch of rollouts; the learning rates' schedules span them."""
    rollouts_per_step: int = Field(default=32, ge=8)
    """Completions sampled in each step; advantages are whitened over all of them."""
    completions_per_prompt: int = Field(default=1, ge=1)
    """Completions of each prompt in a step; a divisor of the rollouts."""
    kl_budget: float = Field(default=12.0, gt=0)
    """The stage stops when the mean KL a completion to the policy it started from is above this, in nats."""
    learning_rate: float = Field(default=2e-4, ge=0, le=1)
    """The policy's peak rate. An adapter wants about 1e-4 (B starts at 0), `weights: full` 1e-6 to 1e-5."""
    schedule: Schedule = "linear"
    """`linear` and `cosine` let both rates fall to zero over the stage."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which both rates rise from zero."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of each role are scaled down to this norm before every step."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        exact_div(
            self.rollouts_per_step,
            self.completions_per_prompt,
            "rollouts_per_step over completions_per_prompt",
        )
        return self

    def optimizer(self, learning_rate: float) -> Optimizer:
        """The optimiser of one role."""
        return Optimizer(
            learning_rate=learning_rate,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            max_grad_norm=self.max_grad_norm,
        )


@dataclass(frozen=True)
class PolicyData:
    """What an on-policy algorithm is given."""

    prompts: Sequence[Prompt]
    reward: RewardSource
    generator: Generator
    seed: int
    from_reference: bool
    """The policy starts as the reference: then its KL to it must start at exactly 0."""
    watched: RewardSource | None = None
    """A score that is logged as `objective/gold` and used for nothing."""
    texts: Sequence[Prompt] = ()
    """What a pretraining mix goes on predicting."""
    monitors: Watcher | None = None
    """What looks at every step and may end the stage; it changes nothing else."""


class Trained(NamedTuple):
    """How a stage ended."""

    ended: str
    """Why: `num_steps`, `kl_budget`, or `monitor:` with the monitor's name."""
    selection: Selection
    """The step that is the candidate, and why."""
    metrics: dict[str, float]
    """Closing numbers."""


class Ended(NamedTuple):
    """How the steps ended."""

    why: str
    """As in `Trained`."""
    steps: int
    """Steps that were taken."""


class OnPolicy(Protocol):
    """One algorithm's part of the loop."""

    kl_budget: float
    """Mean KL a completion to the policy the stage began with that ends it, in nats."""

    def experience(self, step: int, trunk: Trunk, data: PolicyData, times: dict[str, float]) -> Experience:
        """The batch of a step: a pure function of the step, the weights and the algorithm's state."""

    def update(
        self,
        step: int,
        trunk: Trunk,
        found: Experience,
        optimizers: Mapping[str, RoleOptimizer],
        seed: int,
        watch: Watch,
    ) -> dict[str, float]:
        """Learn from a batch."""

    def describe(self, trunk: Trunk, found: Experience) -> dict[str, float]:
        """The numbers of a batch, `objective/kl_to_start` and `objective/kl_sequence` among them."""

    def settle(self, step: int, trunk: Trunk) -> None:
        """What is done after so many steps, before the next: the reference may move."""

    def state(self) -> dict[str, Json]:
        """What the next step depends on, beside weights and optimisers."""

    def load_state(self, state: dict[str, Json]) -> None:
        """Go on where `state` was taken."""


def run_steps(
    algorithm: OnPolicy,
    trunk: Trunk,
    data: PolicyData,
    optimizers: Mapping[str, RoleOptimizer],
    num_steps: int,
    watch: Watch,
    sink: Spool,
    checkpoints: Checkpoints | None,
    best: BestStep | None = None,
) -> Ended:
    """Run to the end, from the last checkpoint if there is one."""
    taken = _resumed(algorithm, trunk, data, optimizers, checkpoints, best)
    if best is not None and taken == 0:
        best.evaluate(0, trunk, list(optimizers), sink)
    for step in range(taken, num_steps):
        times: dict[str, float] = {}
        found = algorithm.experience(step, trunk, data, times)
        watch.experience(step, found, data)
        described = algorithm.describe(trunk, found)
        with timed(times, "time/update_seconds"):
            updates = algorithm.update(step, trunk, found, optimizers, data.seed, watch)
        metrics = {**described, **updates, **times}
        _tell(step, num_steps, trunk, data, found, metrics, sink)
        why = _ended(algorithm, data, metrics, sink)
        if why is None:
            algorithm.settle(step + 1, trunk)
            why = "num_steps" if step + 1 == num_steps else None
        if best is not None and best.due(step + 1, why is not None):
            best.evaluate(step + 1, trunk, list(optimizers), sink)
        if why is not None:
            return Ended(why, step + 1)
        if checkpoints is not None and checkpoints.due(step + 1):
            _save(step + 1, algorithm, trunk, data, optimizers, sink, checkpoints, best)
    raise AssertionError(f"a stage of {num_steps} steps has taken {taken}: there is none to end with")


def _tell(
    step: int,
    num_steps: int,
    trunk: Trunk,
    data: PolicyData,
    found: Experience,
    metrics: dict[str, float],
    sink: Spool,
) -> None:
    """All that is said of a step, after its update; what is watched is added to its metrics."""
    if data.watched is not None:
        metrics["objective/gold"] = float(data.watched.score(found.completions).total.mean())
    alarms = data.monitors.step(step, found, metrics) if data.monitors is not None else []
    if data.monitors is not None:
        metrics["policy/alarms"] = float(data.monitors.num_alarmed)
    sink.log(step, metrics)
    for alarm in alarms:
        sink.alarm(alarm.line)
    if is_looked_at(step, num_steps):
        sink.samples(looks(step, found, trunk.codec))
    sink.progress(
        step + 1,
        num_steps,
        f"reward {metrics['objective/scores']:+.3f}  KL {metrics['objective/kl_sequence']:.2f}",
    )


def _ended(algorithm: OnPolicy, data: PolicyData, metrics: dict[str, float], sink: Spool) -> str | None:
    """Why the stage ends after this step, before all of its steps are taken; None if it goes on."""
    to_start = metrics["objective/kl_to_start"]
    if to_start > algorithm.kl_budget:
        sink.alarm(f"KL to the round's start is {to_start:.2f}, over its budget {algorithm.kl_budget}: ended")
        return "kl_budget"
    return data.monitors.ended if data.monitors is not None else None


def _save(
    step: int,
    algorithm: OnPolicy,
    trunk: Trunk,
    data: PolicyData,
    optimizers: Mapping[str, RoleOptimizer],
    sink: Spool,
    checkpoints: Checkpoints,
    best: BestStep | None,
) -> None:
    """All that the next step depends on, as `_resumed` reads it."""
    roles = {role: optimizer.state() for role, optimizer in optimizers.items()}
    if REFERENCE in trunk.roles:
        roles[REFERENCE] = {n: p.detach() for n, p in trunk.parameters(REFERENCE).items()}
    state: dict[str, Json] = {"algorithm": algorithm.state()}
    if data.monitors is not None:
        state["monitors"] = data.monitors.state_dict()
    if best is not None:
        state["best"] = best.state()
        roles.update({f"{BEST}{role}": weights for role, weights in best.kept().items()})
    checkpoints.save(step, roles, state, sink)


@torch.no_grad()
def _resumed(
    algorithm: OnPolicy,
    trunk: Trunk,
    data: PolicyData,
    optimizers: Mapping[str, RoleOptimizer],
    checkpoints: Checkpoints | None,
    best: BestStep | None,
) -> int:
    """Put everything where the last checkpoint has it; gives the steps that were taken."""
    if checkpoints is None or checkpoints.last is None:
        return 0
    for role, optimizer in optimizers.items():
        optimizer.load_state(checkpoints.tensors(role))
    if REFERENCE in trunk.roles:
        kept = checkpoints.tensors(REFERENCE)
        for name, weight in trunk.parameters(REFERENCE).items():
            weight.copy_(kept[name])
    state = checkpoints.last.state
    algorithm.load_state(cast(dict[str, Json], state["algorithm"]))
    if data.monitors is not None:
        data.monitors.load_state_dict(cast(dict[str, Json], state["monitors"]))
    if best is not None:
        kept_best = cast(dict[str, Json], state["best"])
        best.load_state(kept_best, lambda role: checkpoints.tensors(f"{BEST}{role}"))
    return checkpoints.last.step
