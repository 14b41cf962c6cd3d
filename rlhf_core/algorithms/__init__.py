"""The door to algorithms: what changes the policy."""

from typing import Annotated, Protocol

from pydantic import Field

from rlhf_core.algorithms.on_policy import PolicyData, Trained
from rlhf_core.algorithms.ppo import PPO
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.metrics import Spool
from rlhf_core.trunk import Trunk


class Algorithm(Protocol):
    """Changes the role policy, and the roles that serve it, on a trunk that is otherwise left as it was."""

    def train(
        self, trunk: Trunk, data: PolicyData, sink: Spool, checkpoints: Checkpoints | None = None
    ) -> Trained:
        """Run to the end, from the last checkpoint if there is one."""


AlgorithmSettings = Annotated[PPO, Field()]
"""Settings whose `build(sampling)` gives an `Algorithm`."""
