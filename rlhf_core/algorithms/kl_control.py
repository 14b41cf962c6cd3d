"""What KL to the reference costs, in the reward or in the loss, by a fixed coefficient or a steered one; and
what the reference is."""

from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from rlhf_core.kl import KLEstimator
from rlhf_core.settings import Json, Settings
from rlhf_core.trunk import Trunk

MAX_ERROR = 0.2


class KLKnobs(Settings):
    """The knobs of the KL penalty, of every algorithm that has one."""

    kl_coef: float = Field(default=0.05, ge=0)
    """How much a nat of KL to the reference costs, in units of the normalised reward."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """The same as a term of the loss, a token; wants `kl_coef: 0`, since KL is paid for in one place."""
    kl_estimator: KLEstimator = KLEstimator.K1
    """How one token's KL is estimated; in the loss, k2 has the KL's own gradient."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats a completion that the coefficient is steered towards; null leaves it as it is set."""
    kl_horizon: int = Field(default=2000, ge=1)
    """Completions over which the steering takes effect; a smaller one steers harder."""

    reference: Literal["initial", "champion"] = "initial"
    """The policy that KL is measured to: the initial one, the first on its trunk, or the one in service."""
    refresh_steps: int = Field(default=0, ge=0)
    """Steps after which the reference moves to the current policy, each time; 0 leaves it where it is."""
    refresh_mixing: float = Field(default=1.0, gt=0, le=1)
    """How far it moves then, weight by weight: 1 is all the way (Gorbatovski et al., 2024)."""

    def start_reference(self, trunk: Trunk, initial: Path, starts_as_initial: bool) -> None:
        """Make the roles reference and start, from the role policy, where the bare trunk does not serve."""
        if self.reference == "champion":
            trunk.copy_role("policy", "reference")
        elif self.refresh_steps:
            trunk.load_role("reference", initial)
        if self.refresh_steps or (self.reference == "initial" and not starts_as_initial):
            trunk.copy_role("policy", "start")

    @torch.no_grad()
    def refresh(self, step: int, trunk: Trunk) -> None:
        """Move the reference, after so many steps, if it is time."""
        if not self.refresh_steps or step % self.refresh_steps:
            return
        policy = trunk.parameters("policy")
        for name, weight in trunk.parameters("reference").items():
            weight.lerp_(policy[name], self.refresh_mixing)

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.kl_coef and self.kl_loss_coef:
            raise ValueError(
                f"kl_coef {self.kl_coef} and kl_loss_coef {self.kl_loss_coef}: KL would be paid for "
                "twice, in the reward and in the loss. Set one of them to 0."
            )
        if self.kl_loss_coef and self.kl_estimator is KLEstimator.K1:
            raise ValueError(
                "kl_estimator k1 in the loss: its gradient is zero on average, so the policy would not be "
                "held at all. Use k2, whose gradient is the KL's, or kl_coef."
            )
        if self.kl_target is not None and not (self.kl_coef or self.kl_loss_coef):
            raise ValueError(
                f"kl_target {self.kl_target} steers a coefficient of 0, which stays 0: set the "
                "kl_coef to start from"
            )
        return self


class KLController:
    """The coefficient of a stage, steered towards `kl_target` (Ziegler et al., 2019, section 2.2).

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon
    with KL the mean over completions of the summed log ratio, whatever estimates the penalty.
    """

    def __init__(self, knobs: KLKnobs) -> None:
        self.knobs = knobs
        self.coef = knobs.kl_coef or knobs.kl_loss_coef

    @property
    def in_reward(self) -> float:
        """What a nat costs in the reward."""
        return self.coef if self.knobs.kl_coef else 0.0

    @property
    def in_loss(self) -> float:
        """What a nat costs in the loss."""
        return self.coef if self.knobs.kl_loss_coef else 0.0

    def update(self, kl: float, completions: int) -> None:
        """Take notice of the mean KL of so many completions, in nats a completion."""
        if self.knobs.kl_target is None:
            return
        error = min(max(kl / self.knobs.kl_target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1.0 + error * completions / self.knobs.kl_horizon

    def state(self) -> dict[str, Json]:
        """What the next step depends on."""
        return {"kl_coef": self.coef}

    def load_state(self, state: dict[str, Json]) -> None:
        """Go on where `state` was taken."""
        self.coef = float(str(state["kl_coef"]))
