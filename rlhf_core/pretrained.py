"""How transformers is asked for weights: no remote code, no pickles, no dropout, a pad that is only a pad."""

import contextlib
import datetime
import re
from pathlib import Path
from typing import cast

import gguf
import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from rlhf_core.models import Base

disable_progress_bar()  # type: ignore[no-untyped-call]  # a stage tells its own progress

SPARE_TOKEN = re.compile(r"pad|unused|reserved|empty", re.IGNORECASE)
"""Control tokens whose name says that they stand for nothing: a missing pad is chosen from them."""

TEMPLATE_DATE = datetime.date(2025, 1, 1)
"""What a chat template that asks for today's date is told: the ids of a prompt never depend on the day."""


def read(
    source: str,
    dtype: torch.dtype,
    *,
    revision: str = "main",
    local: bool = True,
    strict: bool = False,
    weights: bool = True,
) -> Base:
    """The model and tokenizer at `source`, a folder or a name on the hub; no weight may be missing.

    `strict` refuses weights that the model has no place for, too. Without `weights` none is read.
    """
    asked = {"revision": revision, "local_files_only": local, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **asked)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"model {source!r} is quantised ({config.quantization_config}): nothing can be merged into it. "
            "Name the unquantised model."
        )
    if not weights:
        return Base(hollow(config, source, revision, local), AutoTokenizer.from_pretrained(source, **asked))
    loaded: object = AutoModelForCausalLM.from_pretrained(
        source,
        config=without_dropout(config),
        dtype=dtype,
        attn_implementation="sdpa",
        use_safetensors=True,
        output_loading_info=True,
        **asked,
    )
    model, report = cast(tuple[PreTrainedModel, dict[str, set[object]]], loaded)
    wrong = {"missing": report["missing_keys"], "of another shape": report["mismatched_keys"]}
    if strict:
        wrong["left over"] = report["unexpected_keys"]
    if any(wrong.values()):
        said = "; ".join(
            f"{what}: {', '.join(sorted(map(str, keys)))}" for what, keys in wrong.items() if keys
        )
        raise ValueError(
            f"the weights at {source!r} do not fit a {type(model).__name__} ({said}): "
            "it would answer with random numbers. Name a complete causal language model."
        )
    return Base(model, AutoTokenizer.from_pretrained(source, **asked))


def hollow(config: PreTrainedConfig, source: str, revision: str, local: bool) -> PreTrainedModel:
    """A model without weights, with the end tokens that the one at `source` has."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with contextlib.suppress(OSError):  # not every model has generation settings of its own
        model.generation_config = GenerationConfig.from_pretrained(
            source, revision=revision, local_files_only=local
        )
    return model


def read_gguf(file: Path, weights: bool = True) -> Base:
    """The model in a GGUF file as a plain float32 one, and its tokenizer."""
    asked = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **asked)
    rule = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    if rule is not None and rule.contents() == "smollm":
        # By this rule each digit stands alone, which transformers does not carry over: without it a blank
        # line before a number becomes two tokens, which the model has never seen there.
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    if not weights:
        config = AutoConfig.from_pretrained(file.parent, **asked)
        return Base(hollow(config, str(file.parent), "main", local=True), tokenizer)
    source = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **asked)
    # A model marked as quantised cannot be saved; the file's own title would enter the trunk's bytes.
    unwanted = {"quantization_config", "_model_name_or_path", "_name_or_path"}
    kept = {key: value for key, value in source.config.to_dict().items() if key not in unwanted}
    config = without_dropout(type(source.config).from_dict(kept))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="sdpa", trust_remote_code=False
    )
    model.load_state_dict(source.state_dict(), strict=True)
    model.generation_config = source.generation_config
    return Base(model, tokenizer)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` with every dropout at 0, before a model copies the rates into its layers."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def give_own_pad(base: Base, ends: tuple[int, ...]) -> None:
    """Make the pad a token that means nothing else, within the embedding matrix if there is one to spare."""
    model, tokenizer = base.model, base.tokenizer
    taken = {*ends, tokenizer.bos_token_id, tokenizer.unk_token_id, None}
    rows: int = model.config.vocab_size
    if tokenizer.pad_token_id in taken:
        spare = [
            token.content
            for index, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.special and index not in taken and index < rows and SPARE_TOKEN.search(token.content)
        ]
        tokenizer.add_special_tokens({"pad_token": spare[0] if spare else "<|pad|>"})
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > rows:
        model.resize_token_embeddings(needed, mean_resizing=False)
        output: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for layer in (model.get_input_embeddings(), output):
            for weights in layer.parameters(recurse=False):
                weights.data[rows:] = weights.data[:rows].double().mean(dim=0).to(weights.dtype)


def freeze_date(tokenizer: PreTrainedTokenizerBase) -> None:
    """Write `TEMPLATE_DATE` into the chat template wherever it asks for today's date."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return
    template = re.sub(
        r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
        lambda call: repr(TEMPLATE_DATE.strftime(call[2])),
        template,
    )
    if "strftime_now(" in template:
        raise ValueError(
            "the chat template asks for today's date in a way that cannot be fixed: equal prompts would get "
            "other ids tomorrow. Write a date, or `strftime_now('%d %b %Y')` with its format spelled out."
        )
    tokenizer.chat_template = template


def freeze(base: Base, dtype: torch.dtype) -> Base:
    """`base` with its parameters in `dtype`, none of them trained, in evaluation mode and without dropout.

    Buffers keep their own dtype: rotary frequencies rounded to bfloat16 move every position.
    """
    model: torch.nn.Module = base.model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    base.model.config.dtype = dtype
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.requires_grad_(False).eval()
    return base
