"""Sampling through transformers' `generate`, with our own draw: one counted uniform number a row and step.

Left padding exists in this file only. A row's randomness is its own seed's, whatever is decoded beside it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf_core.generation import Progress, Sample, Sampling
from rlhf_core.records import StopReason
from rlhf_core.trunk import Trunk


class InverseTransform(LogitsProcessor):
    """Draws the next token by inverting the cumulative distribution at a given uniform number.

    `generate` then only has to take the largest score, and its global random state is never used.
    """

    def __init__(self, uniforms: Tensor, prompt_width: int, temperature: float) -> None:
        self.uniforms = uniforms  # [B, T] in [0, 1)
        self.prompt_width = prompt_width
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] logits to [B, V] scores whose largest is the drawn token."""
        step = input_ids.shape[1] - self.prompt_width
        cumulative = (scores.float() / self.temperature).softmax(-1).cumsum(-1)
        target = self.uniforms[:, step, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class HFGenerator:
    """A `Generator` for every model that transformers can generate with."""

    @torch.no_grad()
    def sample(
        self,
        trunk: Trunk,
        role: str,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Progress = lambda done, total: None,
    ) -> list[Sample]:
        """One response for each prompt; prompts of like length are decoded together."""
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        found: dict[int, Sample] = {}
        with trunk.merged(role), _bare(trunk.model):
            for start in range(0, len(order), sampling.batch_size):
                rows = order[start : start + sampling.batch_size]
                samples = _decode(
                    trunk, [prompts[row] for row in rows], [seeds[row] for row in rows], sampling
                )
                found.update(zip(rows, samples, strict=True))
                progress(len(found), len(order))
        return [found[row] for row in range(len(prompts))]


@contextmanager
def _bare(model: PreTrainedModel) -> Iterator[None]:
    """Without the model's own generation defaults: `generate` merges them into whatever it is handed."""
    own = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = own


def _decode(
    trunk: Trunk, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
) -> list[Sample]:
    width = max(len(prompt) for prompt in prompts)
    pad = trunk.codec.pad_id
    input_ids = torch.tensor([[*[pad] * (width - len(p)), *p] for p in prompts], device=trunk.device)
    attention_mask = torch.tensor(
        [[*[0] * (width - len(p)), *[1] * len(p)] for p in prompts], device=trunk.device
    )
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(trunk.codec.eos_ids),
        pad_token_id=pad,
    )
    uniforms = torch.stack(
        [torch.rand(sampling.max_new_tokens, generator=torch.Generator().manual_seed(s)) for s in seeds]
    ).to(trunk.device)
    draw = InverseTransform(uniforms, width, sampling.temperature)
    output = trunk.model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        generation_config=config,
        logits_processor=LogitsProcessorList([draw]),
    )
    return [_cut(row, trunk.codec.eos_ids) for row in output[:, width:].tolist()]


def _cut(ids: list[int], eos_ids: tuple[int, ...]) -> Sample:
    """The response up to and including its first end token; what `generate` padded after it is dropped."""
    for position, token in enumerate(ids):
        if token in eos_ids:
            return Sample(ids[: position + 1], StopReason.EOS)
    return Sample(ids, StopReason.LENGTH)
