"""Weights of a role's own: trained as a plain model is, copied late, and never at the base's expense."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.algorithms.optimize import Optimizer, RoleOptimizer
from rlhf_core.batch import TextBatch
from rlhf_core.models import Base, TinyModel, load_base
from rlhf_core.settings import Weights
from rlhf_core.tiny_model import byte_tokenizer
from rlhf_core.trunk import Lora, Trunk

MakeTrunk = Callable[..., Trunk]
MakeBatch = Callable[..., TextBatch]
Stir = Callable[..., None]

SIZES = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 256}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **LLAMA, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **LLAMA, tie_word_embeddings=False)),
    # Transposed layers, biases, learned positions, tied.
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=150)),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def weights() -> Weights:
    """This file is about weights of a role's own."""
    return "full"


@pytest.fixture
def trunk(make_trunk: MakeTrunk) -> Trunk:
    """A trunk of the tiny model, without a role."""
    return make_trunk()


def tensors(trunk: Trunk, *roles: str) -> list[dict[str, int]]:
    """Where each weight of the base, and of each role as the model computes with it, lies in memory."""
    found = [{name: p.data_ptr() for name, p in trunk.model.named_parameters()}]
    for role in roles:
        with torch.no_grad(), trunk.role(role):
            found.append({name: p.data_ptr() for name, p in trunk.model.named_parameters()})
    return found


def copies(trunk: Trunk) -> float:
    """Sets of weights in memory, the base's among them."""
    found = tensors(trunk, *trunk.roles)
    return len({place for held in found for place in held.values()}) / len(found[0])


def train(trunk: Trunk, role: str, batch: TextBatch, steps: int = 1) -> None:
    """A few steps up the likelihood of the batch."""
    optimizer = RoleOptimizer(trunk, role, Optimizer(learning_rate=1e-2), steps)
    for _ in range(steps):
        with trunk.role(role):
            (-trunk.logprobs(batch, 1.0)[0].sum()).backward()
        optimizer.step()


@torch.no_grad()
def said(trunk: Trunk, role: str, batch: TextBatch) -> Tensor:
    with trunk.role(role):
        return trunk.logprobs(batch, 1.0)[0]


# As a plain model


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_plain_model_with_these_weights(make_batch: MakeBatch, model: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = MODELS[model]().eval().requires_grad_(False)
    plain = copy.deepcopy(made).requires_grad_(True)
    trunk = Trunk(Base(made, byte_tokenizer()), "f" * 64, weights="full")
    trunk.add_role("policy", Lora(), seed=0)
    batch = make_batch([(12, 20)])
    with trunk.role("policy"):
        trunk.logprobs(batch, 0.7)[0].square().sum().backward()
    ids = torch.cat([batch.query_ids, batch.response_ids], 1)
    p = (plain(input_ids=ids).logits / 0.7).log_softmax(-1)
    p[0, 11:-1].gather(-1, ids[0, 12:, None]).square().sum().backward()  # the 12th token foretells the 13th
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: parameter.grad for name, parameter in trunk.parameters("policy").items()}
    assert found.keys() == wanted.keys() and ("lm_head.weight" in found) == (model == "untied")
    for name, grad in wanted.items():
        assert grad is not None and grad.any(), name
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_plain_transformers_reads_saved_weights_and_says_the_same(
    trunk: Trunk, make_trunk: MakeTrunk, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    train(trunk, "policy", make_batch([(5, 15)]))
    trunk.save_role("policy", tmp_path)
    plain = make_trunk().model
    told = plain.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)
    assert told.unexpected_keys == [] and told.missing_keys == ["lm_head.weight"]  # tied: it is the first
    ids = torch.arange(40)[None]
    with torch.no_grad(), trunk.role("policy"):
        wanted = trunk.model(input_ids=ids).logits
        assert torch.equal(plain(input_ids=ids).logits, wanted)
    with torch.no_grad():
        assert not torch.equal(trunk.model(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_role_says_the_very_same(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype
) -> None:
    trunk, batch = make_trunk(dtype), make_batch([(5, 15), (30, 3)])
    trunk.add_role("policy", Lora(), seed=0)
    stir(trunk, "policy")
    with trunk.merged("policy"):
        found = trunk.logprobs(batch, 1.0)[0]
    assert torch.equal(found, said(trunk, "policy", batch))
    assert not torch.equal(found, said(trunk, "reference", batch))


# Whose tensor is whose


def test_a_role_that_nobody_trains_keeps_no_copy(trunk: Trunk, make_batch: MakeBatch, tmp_path: Path) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    trunk.add_role("reward", Lora(), seed=0, head="last")
    trunk.copy_role("policy", "start")
    trunk.save_role("policy", tmp_path)
    trunk.load_role("loaded", tmp_path)
    batch = make_batch([(5, 15)])
    for role in trunk.roles:
        assert torch.equal(said(trunk, role, batch), said(trunk, "reference", batch))
        assert trunk.is_initial(role)
    with trunk.merged("policy"):
        pass
    assert copies(trunk) == 1
    train(trunk, "policy", batch)
    assert copies(trunk) == 2


def test_a_stage_holds_a_copy_for_each_role_that_moved_and_no_other(
    trunk: Trunk, make_batch: MakeBatch, tmp_path: Path
) -> None:
    """What policy_update does in a later round, its reward model trained beyond the probe."""
    batch = make_batch([(5, 15)])
    for role in ("policy", "reward"):
        trunk.add_role(role, Lora(), seed=0, head="last" if role == "reward" else None)
        train(trunk, role, batch)
        (tmp_path / role).mkdir()
        trunk.save_role(role, tmp_path / role)
    later = Trunk(load_base(TinyModel(hidden_size=32, num_layers=2), torch.float32), "d" * 64, weights="full")
    for role, copied in (("policy", "start"), ("reward", "value")):
        later.load_role(role, tmp_path / role)
        later.copy_role(role, copied)
    assert copies(later) == 3  # the base, policy with start, reward with value
    for role in ("policy", "value"):
        train(later, role, batch)
    assert copies(later) == 5


def test_training_a_role_moves_neither_the_base_nor_a_role_that_shared_its_tensors(
    trunk: Trunk, make_batch: MakeBatch
) -> None:
    batch = make_batch([(5, 15)])
    base = {name: p.detach().clone() for name, p in trunk.model.named_parameters()}
    trunk.add_role("policy", Lora(), seed=0)
    trunk.add_role("bystander", Lora(), seed=0)
    trunk.copy_role("policy", "start")
    before = said(trunk, "start", batch)
    train(trunk, "policy", batch, steps=2)
    assert (said(trunk, "policy", batch) - before).abs().max() > 0.1
    for role in ("start", "bystander", "reference"):
        assert torch.equal(said(trunk, role, batch), before)
    after = dict(trunk.model.named_parameters())
    assert [name for name, kept in base.items() if not torch.equal(after[name], kept)] == []
    # And the other way round: what was copied first may move too.
    moved = said(trunk, "policy", batch)
    train(trunk, "start", batch, steps=2)
    assert torch.equal(said(trunk, "policy", batch), moved)


def test_a_copy_of_a_role_in_training_is_the_role_as_it_is_then(trunk: Trunk, make_batch: MakeBatch) -> None:
    batch = make_batch([(5, 15)])
    trunk.add_role("policy", Lora(), seed=0)
    train(trunk, "policy", batch)
    then = said(trunk, "policy", batch)
    trunk.copy_role("policy", "start")
    train(trunk, "policy", batch)
    assert torch.equal(said(trunk, "start", batch), then)
    assert not torch.equal(said(trunk, "policy", batch), then)


def test_parameters_that_are_asked_for_inside_of_the_role_are_those_it_computes_with(
    trunk: Trunk, make_batch: MakeBatch
) -> None:
    batch = make_batch([(5, 15)])
    trunk.add_role("policy", Lora(), seed=0)
    with torch.no_grad(), trunk.role("policy"):
        before = trunk.logprobs(batch, 1.0)[0]
        trunk.parameters("policy")["model.norm.weight"].mul_(2)
        assert not torch.equal(trunk.logprobs(batch, 1.0)[0], before)
    assert torch.equal(said(trunk, "reference", batch), before)


def test_an_embedding_that_is_the_output_layer_too_stays_one_tensor(trunk: Trunk) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    assert [name for name in trunk.parameters("policy") if "embed" in name or "lm_head" in name] == [
        "model.embed_tokens.weight"
    ]
    model = trunk.model
    for role in ("policy", "reference"):
        with trunk.role(role):
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad(), trunk.role("policy"):
        held = model.get_input_embeddings().weight
    assert held is trunk.parameters("policy")["model.embed_tokens.weight"]


# Files


def test_the_file_holds_the_weights_that_moved_and_no_other(trunk: Trunk, tmp_path: Path) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    trunk.save_role("policy", tmp_path)
    assert load_file(tmp_path / "weights.safetensors") == {}
    own = trunk.parameters("policy")
    with torch.no_grad():
        own["model.norm.weight"][3] += 1
        own["model.layers.0.mlp.up_proj.weight"].view(-1)[0] = 0.0
    trunk.save_role("policy", tmp_path)
    assert sorted(load_file(tmp_path / "weights.safetensors")) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert not trunk.is_initial("policy")


def test_a_sign_of_zero_is_a_difference(trunk: Trunk, tmp_path: Path) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    base = dict(trunk.model.named_parameters())["model.norm.weight"]
    base.data[0] = 0.0
    own = trunk.parameters("policy")["model.norm.weight"]
    own.data[0] = -0.0
    trunk.save_role("policy", tmp_path)
    trunk.load_role("loaded", tmp_path)
    assert torch.signbit(trunk.parameters("loaded")["model.norm.weight"][0])
    assert not trunk.is_initial("policy")


def test_weights_of_another_model_are_refused_by_name(trunk: Trunk, tmp_path: Path) -> None:
    trunk.add_role("policy", Lora(), seed=0)
    trunk.save_role("policy", tmp_path)
    told = json.loads((tmp_path / "role.json").read_text())
    (tmp_path / "role.json").write_text(json.dumps({**told, "weights": ["transformer.wte.weight"]}))
    save_file({"transformer.wte.weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"do not fit this trunk: it has no transformer\.wte\.weight"):
        trunk.load_role("start", tmp_path)
    assert trunk.roles == ["policy"]


def test_a_fresh_role_draws_its_head_from_the_seed_and_nothing_else(trunk: Trunk) -> None:
    before = torch.get_rng_state()
    for role, seed in (("a", 1), ("b", 1), ("c", 2)):
        trunk.add_role(role, Lora(), seed, head="last")
    a, b, c = (trunk.parameters(role) for role in "abc")
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert [name for name in a if not torch.equal(a[name], c[name])] == ["head.weight"]
    assert torch.equal(torch.get_rng_state(), before)
