"""The critic: where it starts, and how it learns beside the policy."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from rlhf_core.settings import Settings
from rlhf_core.trunk import Trunk


class CriticKnobs(Settings):
    """The knobs of the value function."""

    critic: Literal["reward_model", "zero_head", "policy", "shared"] = "reward_model"
    """Starts as the reward model, as its weights with a head of zero, or as the policy's weights with one;
    `shared` is a head of zero on the policy's own weights, which both losses then move."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps of the stage in which only the critic learns, and no bit of the policy changes."""
    value_learning_rate: float = Field(default=3e-4, ge=0, le=1)
    """The critic's peak rate."""
    value_coef: float = Field(default=1.0, gt=0)
    """Scales the critic's loss; with an optimiser of its own it matters to gradient clipping only."""
    value_clip_range: float | None = Field(default=0.2, gt=0)
    """How far values may move before their gain is held; null switches it off."""

    @model_validator(mode="after")
    def _own_weights(self) -> Self:
        if self.critic == "shared" and self.critic_warmup_steps:
            raise ValueError(
                f"critic_warmup_steps {self.critic_warmup_steps} with critic shared: the critic has the "
                "policy's weights, so neither can move alone. Use critic: policy, or no warm-up."
            )
        return self

    @property
    def critic_role(self) -> str:
        """The role that has the critic's head."""
        return "policy" if self.critic == "shared" else "value"

    @torch.no_grad()
    def start_critic(self, trunk: Trunk) -> None:
        """Make the critic from the roles reward and policy."""
        if self.critic == "shared":
            trunk.add_head("policy")
        else:
            trunk.copy_role("policy" if self.critic == "policy" else "reward", "value", head="last")
        if self.critic != "reward_model":
            head = trunk.heads[self.critic_role]
            for tensor in (head.weight, head.bias, head.shift):
                tensor.zero_()
            head.scale.fill_(1.0)
