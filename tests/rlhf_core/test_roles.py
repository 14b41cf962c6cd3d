"""A role on disk: equal bytes for equal roles, nothing that does not fit is taken in, plain peft reads it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.batch import TextBatch
from rlhf_core.models import Base, FolderModel, load_base
from rlhf_core.pretrained import freeze
from rlhf_core.roles import merge
from rlhf_core.settings import Weights
from rlhf_core.tiny_model import byte_tokenizer
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.test_trunk import FAMILIES

MakeTrunk = Callable[..., Trunk]
Change = Callable[[dict[str, Tensor]], None]
MODES: list[Weights] = ["lora", "full"]
FILES = {
    "lora": ["adapter_config.json", "adapter_model.safetensors", "head.safetensors", "role.json"],
    "full": ["head.safetensors", "role.json", "weights.safetensors"],
}

# What transformers 5.24 says to peft 0.21 itself, whatever it loads.
PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(params=MODES)
def weights(request: pytest.FixtureRequest) -> Weights:
    """Both ways of holding roles."""
    found: Weights = request.param
    return found


@pytest.fixture
def saved(make_trunk: MakeTrunk, stir: Callable[..., None], tmp_path: Path) -> tuple[Trunk, Path]:
    """A trunk with a trained reward role, and the folder that holds it."""
    trunk = make_trunk()
    trunk.add_role("reward", Lora(rank=4, alpha=8.0), seed=0, head="last")
    stir(trunk, "reward")
    folder = tmp_path / "reward"
    folder.mkdir()
    trunk.save_role("reward", folder)
    return trunk, folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@torch.no_grad()
def told(trunk: Trunk, role: str, batch: TextBatch) -> list[Tensor]:
    with trunk.role(role):
        return [trunk.logprobs(batch, 1.0)[0], trunk.values(batch), trunk.scores(batch)]


def test_a_role_is_the_same_bytes_however_often_and_from_wherever_it_is_saved(
    saved: tuple[Trunk, Path], make_trunk: MakeTrunk, tmp_path: Path, weights: Weights
) -> None:
    trunk, folder = saved
    other = make_trunk()
    other.add_role("policy", Lora(), seed=5)
    other.load_role("another name", folder)
    for source, role in ((trunk, "reward"), (other, "another name")):
        again = tmp_path / role
        again.mkdir(exist_ok=True)
        source.save_role(role, again)
        assert contents(again) == contents(folder)
    assert sorted(contents(folder)) == FILES[weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_role_gives_the_same_bits_its_normaliser_included(
    make_trunk: MakeTrunk, make_batch: Callable[..., TextBatch], stir: Callable[..., None], tmp_path: Path,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    trunk, other = make_trunk(dtype), make_trunk(dtype)
    trunk.add_role("reward", Lora(rank=4), seed=0, head="last")
    stir(trunk, "reward")
    trunk.save_role("reward", tmp_path)
    other.load_role("reward", tmp_path)
    batch = make_batch([(5, 15), (30, 3), (70, 9)])
    for found, wanted in zip(told(other, "reward", batch), told(trunk, "reward", batch), strict=True):
        assert torch.equal(found, wanted)
    head = other.heads["reward"]
    assert (head.shift.item(), head.scale.item()) == pytest.approx((0.3, 1.7))  # what `stir` set


def test_no_path_and_no_metadata_is_inside_the_files(saved: tuple[Trunk, Path], tmp_path: Path) -> None:
    for name, data in contents(saved[1]).items():
        assert str(tmp_path).encode() not in data
        if name.endswith(".safetensors"):  # eight bytes of length, then a JSON header
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            assert "__metadata__" not in header


def test_a_role_of_another_trunk_is_refused(saved: tuple[Trunk, Path]) -> None:
    trunk, folder = saved
    trunk.digest = "e" * 64
    with pytest.raises(ValueError, match="trained on trunk dddddddddddd and this is eeeeeeeeeeee"):
        trunk.load_role("policy", folder)


@pytest.mark.parametrize("weights", MODES)
def test_a_role_of_the_other_kind_is_refused(
    saved: tuple[Trunk, Path], make_trunk: MakeTrunk, weights: Weights
) -> None:
    other: Weights = "full" if weights == "lora" else "lora"
    trunk = make_trunk(weights=other)
    sentence = f"trained with `weights: {weights}`, and this trunk's roles are `weights: {other}`"
    with pytest.raises(ValueError, match=sentence):
        trunk.load_role("reward", saved[1])
    assert trunk.roles == [] and trunk.heads == {}


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[max(tensors)]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["spare"] = torch.zeros(2)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[max(tensors)] = torch.zeros(3)


def retype(tensors: dict[str, Tensor]) -> None:
    tensors[max(tensors)] = tensors[max(tensors)].double()


@pytest.mark.parametrize(
    ("weights", "file", "what"),
    [
        ("lora", "adapter_model", "adapter"),
        ("lora", "head", "head"),
        ("full", "weights", "weights"),
        ("full", "head", "head"),
    ],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"the {} does not fit this trunk: 1 tensors are missing or to spare, .*weight"),
        (add, r"the {} does not fit this trunk: 1 tensors are missing or to spare, spare"),
        (reshape, r"{} tensor .*weight is torch.float32 \[3\], and the trunk wants torch.float32 \["),
        (retype, r"{} tensor .*weight is torch.float64 \[.*, and the trunk wants torch.float32 \["),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_leave_no_role_behind(
    saved: tuple[Trunk, Path], make_batch: Callable[..., TextBatch], file: str, what: str, change: Change,
    message: str,
) -> None:  # fmt: skip
    trunk, folder = saved
    wanted = told(trunk, "reward", make_batch([(5, 15)]))
    path = folder / f"{file}.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message.format(what)):
        trunk.load_role("policy", folder)
    assert trunk.roles == ["reward"] and list(trunk.heads) == ["reward"]
    # The trunk is none the worse: the whole file is taken, and the role that was there says what it said.
    path.write_bytes(whole)
    trunk.load_role("policy", folder)
    for role in ("policy", "reward"):
        for found, said in zip(told(trunk, role, make_batch([(5, 15)])), wanted, strict=True):
            assert torch.equal(found, said)


def test_a_head_that_was_lost_is_missed(saved: tuple[Trunk, Path]) -> None:
    trunk, folder = saved
    (folder / "head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors"):
        trunk.load_role("policy", folder)
    assert trunk.roles == ["reward"]


def test_a_role_in_another_dtype_than_the_trunks_is_refused(
    saved: tuple[Trunk, Path], make_trunk: MakeTrunk
) -> None:
    with pytest.raises(ValueError, match=r"is torch.float32 .*the trunk wants torch.bfloat16"):
        make_trunk(torch.bfloat16).load_role("reward", saved[1])


@PEFT_ASKS
@pytest.mark.parametrize("weights", ["lora"])
@pytest.mark.parametrize("last_layers", [0, 1])
def test_plain_peft_reads_a_saved_adapter_and_says_the_same(
    make_trunk: MakeTrunk, stir: Callable[..., None], tmp_path: Path, last_layers: int
) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", Lora(rank=4, alpha=8.0, last_layers=last_layers), seed=0)
    stir(trunk, "policy")
    trunk.save_role("policy", tmp_path)
    # Warnings are errors: neither an unknown key nor a missing tensor goes by unseen.
    plain = PeftModel.from_pretrained(make_trunk().model, tmp_path).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad(), trunk.role("policy"):
        found, wanted = plain(input_ids=ids).logits, trunk.model(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (
            trunk.model(input_ids=ids).logits - wanted
        ).abs().max() > 0.1  # and the adapter does something


# Merging


def small_update(trunk: Trunk, stir: Callable[..., None]) -> None:
    """A trained role whose changes are small beside the weights, as those of fine-tuning are."""
    trunk.add_role("sft", Lora(rank=4, alpha=8.0), 0)
    stir(trunk, "sft")
    for name, parameter in trunk.parameters("sft").items():
        parameter.data *= 0.3 if ".lora_B." in name else 1.0


def bare(folder: Path, dtype: torch.dtype = torch.float32) -> Base:
    return load_base(FolderModel(path=str(folder)), dtype)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A base model of each family, with sharp opinions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[request.param]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def logprobs(trunk: Trunk, role: str, batch: TextBatch) -> Tensor:
    with trunk.role(role):
        return trunk.logprobs(batch, 1.0)[0]


def test_in_every_family_a_merged_base_says_what_the_adapter_said(
    folder: Path, make_batch: Callable[..., TextBatch], stir: Callable[..., None]
) -> None:
    trunk, batch = Trunk(bare(folder), "f" * 64), make_batch([(12, 20), (60, 40)])
    small_update(trunk, stir)
    wanted = logprobs(trunk, "sft", batch)
    whole = bare(folder)
    merge(whole.model, trunk.parameters("sft"), Lora(rank=4, alpha=8.0))
    merged = Trunk(whole, "f" * 64)
    assert (wanted - logprobs(trunk, "reference", batch)).abs().max() > 0.1  # there was something to merge
    torch.testing.assert_close(logprobs(merged, "reference", batch), wanted, rtol=1e-5, atol=5e-5)


def test_in_every_family_merging_in_float32_before_the_cast_is_nearer_than_in_bfloat16(
    folder: Path, stir: Callable[..., None]
) -> None:
    trunk = Trunk(bare(folder), "f" * 64)
    small_update(trunk, stir)
    lora, adapter = Lora(rank=4, alpha=8.0), trunk.parameters("sft")
    exact = bare(folder)
    merge(exact.model, adapter, lora)
    rounded = dict(freeze(bare(folder), torch.bfloat16).model.named_parameters())
    cast = {name: p.to(torch.bfloat16) for name, p in exact.model.named_parameters()}
    for name, parameter in exact.model.named_parameters():
        update = parameter - bare_weights(folder)[name]
        if update.abs().max() == 0:
            continue
        in_bfloat16 = rounded[name] + update.to(torch.bfloat16)
        # One rounding against three: of the weight, of the update and of their sum.
        off = [(merged.float() - parameter).abs().mean() for merged in (cast[name], in_bfloat16)]
        assert off[0] < 0.9 * off[1]


def bare_weights(folder: Path) -> dict[str, Tensor]:
    return dict(bare(folder).model.named_parameters())


@pytest.mark.parametrize("weights", ["lora"])
def test_merging_into_rounded_weights_is_refused(make_trunk: MakeTrunk, stir: Callable[..., None]) -> None:
    trunk, other = make_trunk(), make_trunk(torch.bfloat16)
    small_update(trunk, stir)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16: .* rounded away"):
        merge(other.model, trunk.parameters("sft"), Lora(rank=4, alpha=8.0))
