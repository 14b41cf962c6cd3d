"""Small real things that many tests share: a tiny trunk with sharp opinions, and batches of random rows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlhf_core.batch import TextBatch, collate
from rlhf_core.models import Base, TinyModel, load_base
from rlhf_core.settings import Weights
from rlhf_core.trunk import Trunk

DIGEST = "d" * 64
PAD = 256  # of the byte tokenizer: its 256 bytes come first


def sharpened(base: Base) -> Base:
    """`base` with larger weights: fresh ones give all but equal logits, which hide any mistake."""
    for parameter in base.model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10
    return base


@pytest.fixture
def weights() -> Weights:
    """How the trunks of a test hold their roles: a test or a file that means both modes is parametrised."""
    return "lora"


@pytest.fixture
def make_trunk(weights: Weights) -> Callable[..., Trunk]:
    """Makes a trunk of its own for each call, since roles change the model they are added to."""

    def make(dtype: torch.dtype = torch.float32, model: TinyModel | None = None, **how: Any) -> Trunk:
        tiny = model or TinyModel(hidden_size=32, num_layers=2)
        return Trunk(sharpened(load_base(tiny, dtype)), DIGEST, **{"weights": weights, **how})

    return make


@pytest.fixture
def stir() -> Callable[..., None]:
    """Moves a role and its head by random numbers, as if it had been trained; returns nothing."""

    def stir(trunk: Trunk, role: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in trunk.parameters(role).items():
            moved = 0.1 * torch.randn(parameter.shape, generator=generator)
            if ".lora_" not in name and not name.startswith("head."):  # not of a role alone: it stays a model
                moved += parameter.data
            parameter.data = moved.to(parameter.dtype)
        if role in trunk.heads:
            trunk.heads[role].shift.fill_(0.3)
            trunk.heads[role].scale.fill_(1.7)

    return stir


@pytest.fixture
def make_batch() -> Callable[..., TextBatch]:
    """Makes a batch of random rows from (prompt length, response length) pairs."""

    def make(lengths: Sequence[tuple[int, int]], seed: int = 0) -> TextBatch:
        generator = torch.Generator().manual_seed(seed)

        def ids(size: int) -> list[int]:
            return torch.randint(256, (size,), generator=generator).tolist()

        return collate([ids(q) for q, _ in lengths], [ids(t) for _, t in lengths], PAD)

    return make
