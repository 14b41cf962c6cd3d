"""Which step of a policy update is the candidate, and why: what a stage writes and a report shows."""

from typing import Literal

from pydantic import Field

from rlhf_core.gates import Estimate
from rlhf_core.settings import Settings

Rule = Literal["last", "best"]
"""`last` takes the policy as the stage leaves it, `best` the one that was judged best on held-out prompts."""


class Evaluation(Settings):
    """The policy after some steps, on the slice; means over its prompts, one completion each."""

    step: int = Field(ge=0)
    """Steps that were taken; 0 is the policy the stage started from."""
    reward: float
    """Mean score, clipped and less its penalties as in training."""
    kl: float
    """Mean summed log ratio to the reference as it was when the stage began; nats a completion."""
    objective: float
    """`reward` minus `kl_coef` times `kl`."""
    gain: Estimate
    """Objective minus that of the start, paired by prompt, with its 95 % interval."""

    @property
    def spoken(self) -> str:
        """The gain and its interval."""
        return f"{self.gain.value:+.4f}, {self.gain.low:+.4f} to {self.gain.high:+.4f}"


class Selection(Settings):
    """The step that was chosen; the file `selection.json` of an artifact."""

    rule: Rule
    """What was asked for."""
    step: int
    """Steps after which the policy is the candidate."""
    steps: int
    """Steps that were taken in all."""
    why: str
    """A sentence for people."""
    kl_coef: float | None = None
    """What a nat of KL cost in the objective of every evaluation; None where there was none."""
    prompts: tuple[str, ...] = ()
    """Ids of the slice, which the stage never trained on."""
    evaluations: tuple[Evaluation, ...] = ()
    """Every one, in order."""


def last_step(steps: int) -> Selection:
    """The record of a stage that was asked for no choice."""
    why = f"The candidate is the policy after {steps} of {steps} steps: `candidate` is set to `last`."
    return Selection(rule="last", step=steps, steps=steps, why=why)
