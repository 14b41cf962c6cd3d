"""reward_modeling: Bradley-Terry on every label so far: a linear probe, then fresh weights with it.

Stiennon et al., 2020, section 3.4; all pairs of a prompt in one minibatch, each completion encoded once
(Ouyang et al., 2022, section 3.5).
"""

from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algorithms.optimize import Diagnostics, Optimizer, Pass, RoleOptimizer, optimize, stepped
from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import PreferenceBatch, collate_completions
from rlhf_core.losses import bradley_terry_loss
from rlhf_core.records import Completion
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.context import StageContext
from rlhf_core.stages.labels import read_groups, split_groups, to_batch
from rlhf_core.trunk import Lora, Pooling, Trunk

NAME, VERSION = "reward_modeling", 3
MIN_REFERENCE_SAMPLES = 8


class RewardModeling(Settings):
    """How the reward model is trained."""

    lora: Lora = Lora()
    """Its adapter, where `bootstrap.weights` is lora; a smaller one memorises less."""
    pooling: Pooling = "last"
    """What its head reads of a completion: `last` is the habit, `mean` learns more from few pairs."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-4, schedule="linear")
    """Its optimiser."""
    probe_decay: float = Field(default=0.3, gt=0)
    """L2 penalty of the linear probe that the head starts from; more where labels are few or noisy."""
    num_epochs: int = Field(default=2, ge=0, le=50)
    """Times every pair is seen by the weights after the probe; more mostly memorises. 0 keeps the probe."""
    prompts_per_minibatch: int = Field(default=4, ge=1)
    """Prompts, each with all its pairs, in one step."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of labels believed to be flipped."""
    center_coef: float = Field(default=0.001, ge=0)
    """Keeps the scores around zero (Eisenstein et al., 2023)."""
    held_out_share: float = Field(default=0.25, gt=0, lt=1)
    """Share of prompts whose labels never train a reward model, in any round."""
    normaliser_samples: int = Field(default=256, ge=MIN_REFERENCE_SAMPLES)
    """Completions of the initial policy, at most, that fix the scores' mean and deviation."""


def run(context: StageContext) -> None:
    """Train on the pool, fit the normaliser, write weights and head."""
    settings = context.settings(RewardModeling)
    trunk = context.trunk()
    trunk.add_role("reward", settings.lora, derive_seed(context.seed, "adapter"), head=settings.pooling)
    groups = [group for folder in context.inputs("preferences") for group in read_groups(folder)]
    train, _ = split_groups(groups, settings.held_out_share)
    batch = to_batch(train, trunk.codec.pad_id, trunk.device)
    context.summary(
        {"reward_model/train_prompts": float(len(train)), "reward_model/train_pairs": float(batch.weight)}
    )
    probe(trunk, batch, settings.probe_decay)
    if settings.num_epochs:
        fit(trunk, batch, settings, context)
    reference = read_rows(labels_of_the_initial_policy(context) / "completions.parquet", Completion)
    normalise(trunk, reference[: settings.normaliser_samples])
    with context.output("reward_model", "reward_model") as folder:
        trunk.save_role("reward", folder)


def labels_of_the_initial_policy(context: StageContext) -> Path:
    """Those of the first round; after a rebase those of the first one on the new trunk, a role apart."""
    own = "initial_preferences"
    return context.input(own) if own in context.job.inputs else context.inputs("preferences")[0]


@torch.no_grad()
def probe(trunk: Trunk, batch: PreferenceBatch, decay: float) -> None:
    """Start the head as the best linear reader of the states as they are (Kumar et al., 2022, LP-FT).

    Minimises mean -log sigmoid(w . (x_chosen - x_rejected)) + decay / 2 * |w|^2 over standardised states x,
    which is convex. A random head would first have to be unlearned, and would bend the states meanwhile.
    """
    with trunk.role("reward"):
        states = trunk.pooled_states(batch.completions).double().cpu()
    mean, deviation = states.mean(0), states.std(0) + 1e-6
    standard = (states - mean) / deviation
    differences = standard[batch.chosen] - standard[batch.rejected]
    weight = torch.zeros(states.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        with torch.enable_grad():
            solver.zero_grad()
            value = -logsigmoid(differences @ weight).mean() + decay / 2 * weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    solver.step(loss)  # type: ignore[no-untyped-call]
    head = trunk.heads["reward"]
    head.weight.copy_(weight / deviation)
    head.bias.copy_(-(mean * weight / deviation).sum())


def fit(trunk: Trunk, batch: PreferenceBatch, settings: RewardModeling, context: StageContext) -> None:
    """Minimise the Bradley-Terry loss of the role reward."""
    steps = settings.num_epochs * (len(batch) // settings.prompts_per_minibatch)
    optimizers = {"reward": RoleOptimizer(trunk, "reward", settings.optimizer, max(1, steps))}
    passes = [Pass("reward", partial(_loss, trunk, settings))]
    walk = optimize(
        trunk,
        batch,
        passes,
        optimizers,
        num_epochs=settings.num_epochs,
        minibatch_size=settings.prompts_per_minibatch,
        seed=derive_seed(context.seed, "order"),
    )
    for step, found in enumerate(stepped(walk)):
        metrics = {
            f"reward_model/train_{name.removeprefix('reward/')}": value for name, value in found.items()
        }
        context.sink.log(step, metrics)
        loss, accuracy = metrics["reward_model/train_loss"], metrics["reward_model/train_accuracy"]
        context.sink.progress(step + 1, steps, f"loss {loss:.3f}  accuracy {accuracy:.2f}")


def _loss(
    trunk: Trunk, settings: RewardModeling, part: PreferenceBatch, denom: int
) -> tuple[Tensor, Diagnostics]:
    scores = trunk.scores(part.completions)
    return bradley_terry_loss(
        scores[part.chosen],
        scores[part.rejected],
        denom,
        label_smoothing=settings.label_smoothing,
        center_coef=settings.center_coef,
    )


@torch.no_grad()
def normalise(trunk: Trunk, reference: list[Completion]) -> None:
    """Shift and scale the head so that scores of the reference policy's samples have mean 0, deviation 1."""
    if len(reference) < MIN_REFERENCE_SAMPLES:
        raise ValueError(
            f"{len(reference)} reference samples: too few to fit a normaliser; label more completions"
        )
    with trunk.role("reward"):
        scores = trunk.scores(collate_completions(reference, trunk.codec.pad_id, trunk.device))
    deviation = scores.std()
    if not deviation > 0:
        raise ValueError(
            "the reward model gives every reference sample the same score: it learned nothing, and PPO would "
            "follow noise. Check that completions differ and that labels are not all ties."
        )
    head = trunk.heads["reward"]
    head.shift.copy_(scores.mean())
    head.scale.copy_(deviation)
