"""The door to algorithms: what changes the policy."""

from typing import Annotated, Protocol

from pydantic import Field

from rlhf_core.algorithms.ppo import PPO, PolicyData
from rlhf_core.metrics import MetricSink
from rlhf_core.trunk import Trunk


class Algorithm(Protocol):
    """Changes the role policy, and the roles that serve it, on a trunk that is otherwise left as it was."""

    def train(self, trunk: Trunk, data: PolicyData, sink: MetricSink) -> str:
        """Run to the end; returns why it ended."""


AlgorithmSettings = Annotated[PPO, Field()]
"""Settings whose `build(sampling)` gives an `Algorithm`."""
