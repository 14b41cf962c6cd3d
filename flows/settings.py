"""What a run is: one settings object for all stages, read from a run file, refused in a sentence."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml
from pydantic import Field, model_validator

from rlhf_core.evals import Evals
from rlhf_core.gates import Gate
from rlhf_core.ledger import PROJECT_NAME
from rlhf_core.settings import Execution, InvalidSettings, Json, Settings, merge, parse_settings
from rlhf_core.sources import PackagedPrompts, PromptSource
from rlhf_core.stages.bootstrap import Bootstrap
from rlhf_core.stages.pairing import Pairing
from rlhf_core.stages.policy_update import PolicyUpdate
from rlhf_core.stages.preferences import Preferences
from rlhf_core.stages.promotion import Promotion
from rlhf_core.stages.prompts import PromptDraw
from rlhf_core.stages.reward_modeling import RewardModeling
from rlhf_core.stages.reward_validation import RewardValidation
from rlhf_core.stages.rollouts import Rollouts

MAX_SEED = 2**53  # what JSON carries everywhere without rounding
FULL_RATE = 1e-4
"""A learning rate above this is one for adapters."""


class RunSettings(Settings):
    """One project's loop: every stage's recipe, and where it runs."""

    project: str = Field(pattern=f"^{PROJECT_NAME.pattern}$")
    """The project's name; it names folders, the MLflow experiment and the registered models."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """What all randomness is derived from."""
    bootstrap: Bootstrap = Bootstrap()
    """The base model; what the project is opened with, whatever champion is merged into it later."""
    prompt_source: PromptSource = PackagedPrompts()
    """Where prompts come from."""
    pretraining_source: PromptSource | None = None
    """Plain texts that the policy goes on predicting, where `policy_update.algorithm.ptx_coef` is above 0."""
    prompts: PromptDraw = PromptDraw()
    """How many prompts a round uses for what."""
    rollouts: Rollouts = Rollouts()
    """Completions for labels."""
    pairing: Pairing = Pairing()
    """Which completions are compared."""
    preferences: Preferences = Preferences()
    """Who labels."""
    reward_model: RewardModeling = RewardModeling()
    """How the reward model is trained."""
    reward_validation: RewardValidation = RewardValidation()
    """How it is validated."""
    reward_gates: tuple[Gate, ...] = (Gate(metric="reward_model/accuracy", direction="above", bound=0.5),)
    """What it must show before it may serve."""
    policy_update: PolicyUpdate = PolicyUpdate()
    """How the policy is changed."""
    evals: Evals = Evals()
    """How policies are measured."""
    promotion: Promotion = Promotion()
    """What a candidate must show to be put in service."""
    execution: Execution = Execution()
    """Where and how fast; part of no result."""

    @model_validator(mode="after")
    def _fits(self) -> "RunSettings":
        groups = self.prompts.labelling * (1 - self.reward_model.held_out_share)
        if groups < self.reward_model.prompts_per_minibatch:
            raise ValueError(
                f"about {groups:.0f} of {self.prompts.labelling} labelled prompts train the reward model, "
                "fewer than reward_model.prompts_per_minibatch "
                f"({self.reward_model.prompts_per_minibatch}): no step would be taken. "
                "Label more prompts a round, or use smaller minibatches."
            )
        return self

    @model_validator(mode="after")
    def _leaves_prompts(self) -> "RunSettings":
        self.policy_update.algorithm.check_slice(self.prompts.policy)
        return self

    def doubts(self) -> list[str]:
        """What is allowed and seldom meant, a sentence each: said before a run, and never refused."""
        if self.bootstrap.weights == "lora":
            return []
        trained = {"policy_update": self.policy_update.to_json()}
        if self.reward_model.num_epochs:
            trained["reward_model"] = self.reward_model.to_json()
        high = ", ".join(f"{name} {rate:g}" for name, rate in _rates(trained) if rate > FULL_RATE)
        adapters = {"bootstrap.lora": self.bootstrap.lora, "reward_model.lora": self.reward_model.lora}
        unused = " and ".join(name for name, lora in adapters.items() if lora != type(lora)())
        found = {
            f"{high}: so high a rate is one for adapters, and soon spoils the weights of a pretrained model. "
            "Set 1e-6 to 1e-5, unless the model is tiny.": bool(high),
            "dtype is bfloat16: a weight that a stage moves by less than about 1/300 of itself is saved as "
            "it was. Set bootstrap.dtype=float32.": self.bootstrap.dtype == "bfloat16",
            f"{unused}: set, and used by nothing.": bool(unused),
        }
        return [f"bootstrap.weights is full, and {said}" for said, holds in found.items() if holds]


def _rates(values: Mapping[str, Json], above: str = "") -> Iterator[tuple[str, float]]:
    """Every learning rate below `values` that is set, by its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _rates(value, f"{above}{name}.")
        elif name.endswith("learning_rate") and isinstance(value, int | float):
            yield f"{above}{name}", float(value)


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings in a YAML run file, with `a.b.c=value` laid over them; raises `InvalidSettings`."""
    if not path.is_file():
        raise InvalidSettings(f"there is no run file {str(path)!r}. The shipped ones are in infra/runs/.")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise InvalidSettings(f"{path} must hold settings by name, and holds {type(values).__name__}")
    for override in overrides:
        values = merge(values, _override(override))
    try:
        return parse_settings(RunSettings, cast(Mapping[str, Json], values))
    except InvalidSettings as error:
        raise InvalidSettings(f"{path} with its overrides is not a run:\n{error}") from error


def _override(text: str) -> dict[str, Json]:
    """`a.b=1` as {a: {b: 1}}, the value read as YAML."""
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        raise InvalidSettings(f"--set {text!r}: write it as path.to.setting=value")
    try:
        nested: Json = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InvalidSettings(f"--set {text!r}: the value is not YAML: {error}") from error
    for part in reversed(name.split(".")):
        nested = {part: nested}
    return cast(dict[str, Json], nested)
