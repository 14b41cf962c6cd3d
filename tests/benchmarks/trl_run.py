"""One batch of TRL's PPOTrainer on the tiny model, read while it runs, and our trunk of the same weights.

TRL computes KL, advantages and losses inside `PPOTrainer.train()`, so its numbers are read where it makes
them: in the frames that call its `masked_whiten` and its `backward`.
"""

import copy
import sys
import tempfile
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForSequenceClassification, PreTrainedModel
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from rlhf_core.kl import KLEstimator
from rlhf_core.models import Base, TinyModel, load_base
from rlhf_core.trunk import Lora, Trunk

ROWS, RESPONSE, NUM_PARTS = 32, 64, 4
TEMPERATURE, KL_COEF, GAMMA, LAM, CLIP, MAX_GRAD_NORM = 0.7, 0.05, 0.99, 0.95, 0.2, 0.1


def sharpened(dtype: torch.dtype = torch.float32) -> Base:
    """The tiny model with larger weights: fresh ones give all but equal logits, which hide any mistake."""
    base = load_base(TinyModel(hidden_size=32, num_layers=2), dtype)
    for parameter in base.model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10
    return base


def our_trunk() -> Trunk:
    """A trunk whose policy has moved, with a reward and a critic that is not the reward."""
    trunk = Trunk(sharpened(), "b" * 64)
    for seed, role in enumerate(("policy", "reward", "value")):
        trunk.add_role(role, Lora(rank=4, alpha=8.0), seed, head=None if role == "policy" else "last")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in trunk.parameters(role).items():
            if name != "head.bias":  # TRL's heads have none
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return trunk


def plain(trunk: Trunk, role: str) -> PreTrainedModel:
    """The role as a model of its own, its adapter merged, in the form that TRL takes."""
    model = sharpened().model
    if role in trunk.heads:
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        model = LlamaForSequenceClassification(config)
        model.score.weight.data = trunk.heads[role].weight.data[None].clone()
    with trunk.role(role) if role == "reference" else trunk.merged(role):
        weights = dict(trunk.model.named_parameters())
        for name, parameter in model.named_parameters():
            if not name.startswith("score."):
                adapted = f"{name.removesuffix('.weight')}.base_layer.weight"
                parameter.data = weights.get(adapted, weights.get(name)).data.clone()
            parameter.requires_grad_(True)
    return model


def prompts(count: int) -> list[list[int]]:
    """Random bytes, 3 to 40 of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 41, (count,), generator=generator).tolist()
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Run:
    """What was seen of one batch of TRL."""

    batch: dict[str, Any] = field(default_factory=dict)
    """Local variables of `train` when it whitens the advantages, and `white`, what whitening gave."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Local variables at each `backward`, a micro-batch each."""
    norms: list[float] = field(default_factory=list)
    """Norm of all gradients at each step that the optimiser takes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What it logged."""

    @property
    def order(self) -> list[int]:
        """The rows as the first epoch took them."""
        return torch.cat([part["rows"] for part in self.parts[:NUM_PARTS]]).tolist()

    @property
    def mask(self) -> Tensor:
        """[B, T] the tokens that TRL counts."""
        return ~self.batch["padding_mask"]

    @property
    def longer(self) -> Tensor:
        """[B, T] those, and the pad after each end."""
        return ~self.batch["padding_mask_p1"]


def copied(frame: FrameType) -> dict[str, Any]:
    """The tensors among a frame's local variables, as they are now."""
    return {k: v.detach().clone() for k, v in frame.f_locals.items() if isinstance(v, Tensor)}


def trainer_of(trunk: Trunk, data: list[list[int]], estimator: KLEstimator, folder: str) -> PPOTrainer:
    """TRL's trainer of the trunk's roles: two epochs of one minibatch in four micro-batches, then done."""
    config = PPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", num_sample_generations=0, disable_tqdm=True, seed=0, learning_rate=1e-3,
        per_device_train_batch_size=ROWS // NUM_PARTS, gradient_accumulation_steps=NUM_PARTS,
        num_mini_batches=1, num_ppo_epochs=2, total_episodes=ROWS, response_length=RESPONSE,
        stop_token="eos", temperature=TEMPERATURE, kl_coef=KL_COEF, kl_estimator=estimator.value,
        gamma=GAMMA, lam=LAM, cliprange=CLIP, cliprange_value=CLIP, max_grad_norm=MAX_GRAD_NORM,
    )  # fmt: skip
    tokenizer = trunk.codec.tokenizer
    tokenizer.padding_side = "left"
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=plain(trunk, "policy"),
        ref_model=plain(trunk, "reference"),
        reward_model=plain(trunk, "reward"),
        value_model=plain(trunk, "value"),
        train_dataset=Dataset.from_dict({"input_ids": data}),
    )


def run_trl(trunk: Trunk, num_prompts: int, estimator: KLEstimator, order: int = 0) -> Run:
    """One batch of ROWS of these many prompts; `order` seeds the shuffling, which TRL's own seed does not."""
    seen = Run()
    np.random.seed(order)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(trunk, prompts(num_prompts), estimator, folder)
        whiten, backward = ppo_trainer.masked_whiten, trainer.accelerator.backward
        step = trainer.optimizer.step

        def whitening(*args: Any, **more: Any) -> Tensor:
            white = whiten(*args, **more)
            seen.batch = copied(sys._getframe(1)) | {"white": white.clone()}
            return white

        def going_back(loss: Tensor) -> None:
            frame = sys._getframe(1)
            seen.parts.append(copied(frame) | {"rows": torch.tensor(frame.f_locals["micro_batch_inds"])})
            backward(loss)

        def stepping(*args: Any, **more: Any) -> None:
            if trainer.accelerator.sync_gradients:  # else TRL's optimiser only pretends
                grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
                seen.norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
            step(*args, **more)

        ppo_trainer.masked_whiten = whitening
        trainer.accelerator.backward, trainer.optimizer.step = going_back, stepping
        trainer.log = lambda metrics, *rest: seen.metrics.update(metrics)
        try:
            trainer.train()
        finally:
            ppo_trainer.masked_whiten = whiten
    return seen
