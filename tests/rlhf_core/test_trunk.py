"""Roles on one trunk: a row's numbers are its own, a role's weights are too, the trunk is never touched.

All of it holds for adapters and for weights of a role's own, unless a test says that it is about adapters.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_core.batch import TextBatch
from rlhf_core.kl import KLEstimator, kl_per_token
from rlhf_core.models import Base, FolderModel, TinyModel, load_base
from rlhf_core.settings import Weights
from rlhf_core.tiny_model import byte_tokenizer
from rlhf_core.trunk import Lora, ScalarHead, Trunk

MakeTrunk = Callable[..., Trunk]
MakeBatch = Callable[..., TextBatch]
Stir = Callable[..., None]

LORA = Lora(rank=4, alpha=8.0)
# Rows of the first bucket of 64 (20 to 64 tokens), of the second and of the third, in no order.
MIXED = [
    (5, 15), (30, 34), (60, 5), (3, 2), (40, 24), (10, 10), (100, 30), (63, 1),
    (64, 1), (1, 1), (20, 44), (7, 50), (33, 12), (128, 20), (2, 62), (16, 16),
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["lora", "full"])
def weights(request: pytest.FixtureRequest) -> Weights:
    """Both ways of holding roles."""
    found: Weights = request.param
    return found


def trained(make_trunk: MakeTrunk, stir: Stir, **how: object) -> Trunk:
    """A trunk whose roles policy and value have moved."""
    trunk = make_trunk(**how)
    for seed, role in enumerate(("policy", "value")):
        trunk.add_role(role, LORA, seed, head="last" if role == "value" else None)
        stir(trunk, role, seed)
    return trunk


@torch.no_grad()
def numbers(trunk: Trunk, batch: TextBatch, temperature: float = 0.7) -> dict[str, Tensor]:
    """Everything that a trunk says of a batch."""
    with trunk.role("policy"):
        logprobs, entropy = trunk.logprobs(batch, temperature, with_entropy=True)
    assert entropy is not None
    with trunk.role("value"):
        values, scores = trunk.values(batch), trunk.scores(batch)
    return {"logprobs": logprobs, "entropy": entropy, "values": values, "scores": scores}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def state(trunk: Trunk, role: str) -> dict[str, Tensor]:
    """A copy of all that makes up a role."""
    head = trunk.heads[role].state_dict() if role in trunk.heads else {}
    return {name: tensor.detach().clone() for name, tensor in {**trunk.parameters(role), **head}.items()}


# A row's numbers are its own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model",
    [
        TinyModel(hidden_size=32, num_layers=2),
        TinyModel(hidden_size=128, num_layers=1),
        pytest.param(TinyModel(hidden_size=576, num_layers=2, num_heads=9), marks=pytest.mark.slow),
    ],
    ids=["narrow", "wide", "as wide as SmolLM2-135M"],
)
def test_a_rows_numbers_are_the_same_bits_in_micro_batches_of_1_to_16_rows(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype, model: TinyModel
) -> None:
    trunk = trained(make_trunk, stir, dtype=dtype, model=model)
    batch = make_batch([(10 + row, 20 + row) for row in range(16)])
    trunk.micro_batch_tokens = 64
    alone = numbers(trunk, batch)
    for rows in (2, 3, 5, 8, 11, 16):
        trunk.micro_batch_tokens = 64 * rows
        assert len(next(batch.micro_batches(64, 64 * rows))[0]) == rows
        assert_equal(numbers(trunk, batch), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket", [8, 64])
def test_a_rows_numbers_do_not_depend_on_its_neighbours_or_their_lengths(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype, bucket: int
) -> None:
    trunk = trained(make_trunk, stir, dtype=dtype, bucket=bucket)
    batch = make_batch(MIXED)
    together = numbers(trunk, batch)
    for row in range(len(MIXED)):
        alone = numbers(trunk, batch.select(torch.tensor([row])))
        assert_equal({name: tensor[row : row + 1] for name, tensor in together.items()}, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_of_the_batch_changes_no_bit_and_what_is_masked_is_zero(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype
) -> None:
    trunk = trained(make_trunk, stir, dtype=dtype)
    batch = make_batch([(5, 15), (30, 3), (70, 9)])
    wider = TextBatch(
        torch.nn.functional.pad(batch.query_ids, (0, 17), value=9),
        batch.query_lengths,
        torch.nn.functional.pad(batch.response_ids, (0, 23), value=9),
        torch.nn.functional.pad(batch.response_mask, (0, 23)),
    )
    found = numbers(trunk, wider)
    for name in ("logprobs", "entropy", "values"):
        assert not found[name][~wider.response_mask].any()
        found[name] = found[name][:, : batch.response_ids.shape[1]]
    assert_equal(found, numbers(trunk, batch))


def test_the_ids_under_the_padding_do_not_matter(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(5, 15), (30, 3)])
    junk = batch.select(torch.arange(2))
    junk.query_ids[0, 5:] = 7
    junk.response_ids[1, 3:] = 7
    assert_equal(numbers(trunk, junk), numbers(trunk, batch))


# What the numbers mean


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("role", ["policy", "reference"])
def test_logprobs_are_those_of_each_token_after_the_prompt_and_the_tokens_before_it(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, temperature: float, role: str
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(4, 6), (9, 3)])
    with torch.no_grad(), trunk.role(role):
        logprobs, entropy = trunk.logprobs(batch, temperature, with_entropy=True)
        assert entropy is not None
        for row in range(2):
            prompt = batch.query_ids[row, : batch.query_lengths[row]].tolist()
            response = batch.response_ids[row, : batch.response_lengths[row]].tolist()
            for t, token in enumerate(response):
                # The definition: the model is shown what came before, and asked for its next token.
                logits = trunk.model(input_ids=torch.tensor([prompt + response[:t]])).logits[0, -1]
                p = (logits.double() / temperature).softmax(-1)
                torch.testing.assert_close(logprobs[row, t].double(), p[token].log(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(
                    entropy[row, t].double(), -(p * p.log()).sum(), rtol=1e-5, atol=1e-6
                )


def test_log_probabilities_of_a_bf16_trunk_are_float32_numbers_near_those_of_the_same_weights_in_float32(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    low, high = (trained(make_trunk, stir, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    rounded = dict(low.model.named_parameters())
    for name, parameter in high.model.named_parameters():
        parameter.data = rounded[name].data.float()
    batch = make_batch(MIXED)
    found, wanted = numbers(low, batch), numbers(high, batch)
    for name in ("logprobs", "entropy", "values", "scores"):
        assert found[name].dtype == torch.float32
    # 8 bits through two layers of large weights: hundredths of a nat. A softmax in bf16 would add as
    # much again, and leave its results on the grid of bf16.
    off = (found["logprobs"] - wanted["logprobs"])[batch.response_mask].abs()
    assert off.mean() < 0.1
    assert (found["logprobs"].bfloat16().float() != found["logprobs"])[
        batch.response_mask
    ].float().mean() > 0.9


def test_the_roles_of_this_file_have_different_opinions(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(4, 6)])
    with torch.no_grad():
        with trunk.role("policy"):
            logprobs = trunk.logprobs(batch, 1.0)[0]
        with trunk.role("reference"):
            ref_logprobs = trunk.logprobs(batch, 1.0)[0]
    assert (logprobs - ref_logprobs).abs().min() > 1e-3


def test_a_value_is_the_score_of_the_completion_so_far(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(12, 20), (12, 7)])
    with torch.no_grad(), trunk.role("value"):
        values = trunk.values(batch)
        for t in range(1, 20):
            cut = TextBatch(
                batch.query_ids, batch.query_lengths, batch.response_ids,
                batch.response_mask & (torch.arange(20) < t),
            )  # fmt: skip
            counted = batch.response_mask[:, t]
            assert torch.equal(trunk.scores(cut)[counted], values[:, t][counted])


def test_the_first_value_is_that_of_the_prompt(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    one, other = make_batch([(12, 3)], seed=1), make_batch([(12, 9)], seed=2)
    other.query_ids = one.query_ids
    with torch.no_grad(), trunk.role("value"):
        assert torch.equal(trunk.values(one)[:, 0], trunk.values(other)[:, 0])


def test_a_score_is_the_heads_number_at_the_last_token_after_the_normaliser(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(4, 6)])
    head = trunk.heads["value"]
    with torch.no_grad(), trunk.role("value"):
        ids = torch.cat([batch.query_ids, batch.response_ids], 1)
        state = trunk.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1].double()
        wanted = (state @ head.weight.double() + head.bias.double() - 0.3) / 1.7  # what `stir` set
        torch.testing.assert_close(trunk.scores(batch)[0].double(), wanted, rtol=1e-5, atol=1e-6)


# Fresh, copied and added roles


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fresh_role_changes_no_bit_and_is_at_kl_zero(
    make_trunk: MakeTrunk, make_batch: MakeBatch, dtype: torch.dtype
) -> None:
    trunk = make_trunk(dtype)
    trunk.add_role("policy", LORA, seed=3)
    batch = make_batch(MIXED)
    with torch.no_grad():
        with trunk.role("policy"):
            logprobs = trunk.logprobs(batch, 1.0)[0]
        with trunk.role("reference"):
            ref_logprobs = trunk.logprobs(batch, 1.0)[0]
    assert torch.equal(logprobs, ref_logprobs)
    assert not kl_per_token(logprobs, ref_logprobs, batch.response_mask, KLEstimator.K1).any()


@pytest.mark.parametrize("weights", ["lora"])
def test_adapters_are_drawn_from_their_seed_and_leave_the_global_generator_alone(
    make_trunk: MakeTrunk,
) -> None:
    before = torch.get_rng_state()
    trunk = make_trunk()
    for role, seed in (("a", 1), ("b", 1), ("c", 2)):
        trunk.add_role(role, LORA, seed, head="last")
    a, b, c = (state(trunk, role) for role in "abc")
    assert_equal(a, b)
    drawn = [name for name in a if "lora_A" in name or name in ("head.weight", "weight")]
    assert len(drawn) > 2
    assert [name for name in drawn if torch.equal(a[name], c[name])] == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copied_critic_gives_the_reward_models_scores_to_the_bit(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype
) -> None:
    trunk = make_trunk(dtype)
    trunk.add_role("reward", LORA, seed=1, head="last")
    stir(trunk, "reward")
    trunk.copy_role("reward", "value")
    assert_equal(state(trunk, "value"), state(trunk, "reward"))
    batch = make_batch(MIXED)
    with torch.no_grad():
        with trunk.role("reward"):
            scores = trunk.scores(batch)
        with trunk.role("value"):
            assert torch.equal(trunk.scores(batch), scores)
    # A copy, not a second name: what the critic learns does not reach the reward.
    stir(trunk, "value", 7)
    with torch.no_grad(), trunk.role("reward"):
        assert torch.equal(trunk.scores(batch), scores)


def test_adding_copying_and_loading_leave_the_other_roles_as_they_were(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, tmp_path: Path
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch(MIXED)
    before, said = {role: state(trunk, role) for role in trunk.roles}, numbers(trunk, batch)
    trunk.add_role("reward", Lora(rank=2, last_layers=1), seed=9, head="last")
    trunk.copy_role("value", "start")
    trunk.save_role("reward", tmp_path)
    trunk.load_role("loaded", tmp_path)
    assert trunk.roles == ["policy", "value", "reward", "start", "loaded"]
    for role, kept in before.items():
        assert_equal(state(trunk, role), kept)
    assert_equal(numbers(trunk, batch), said)


@pytest.mark.parametrize("role", ["layers", "weight", "self_attn", "lora_A"])
def test_a_role_may_be_called_like_a_part_of_the_model(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, role: str
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(4, 6)])
    said = numbers(trunk, batch)
    trunk.add_role(role, LORA, seed=0)
    assert trunk.parameters(role).keys() == trunk.parameters("policy").keys()
    stir(trunk, role, 5)
    assert_equal(numbers(trunk, batch), said)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_pooled_score_is_the_mean_of_the_heads_numbers_after_each_response_token(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, tmp_path: Path, dtype: torch.dtype
) -> None:
    trunk = make_trunk(dtype)
    trunk.add_role("reward", LORA, seed=1, head="mean")
    stir(trunk, "reward")
    batch = make_batch(MIXED)
    head, lengths = trunk.heads["reward"], batch.response_lengths
    with torch.no_grad(), trunk.role("reward"):
        scores = trunk.scores(batch)
        for row in range(len(batch)):
            start = int(batch.query_lengths[row])
            ids = [*batch.query_ids[row, :start].tolist(), *batch.response_ids[row, : lengths[row]].tolist()]
            states = trunk.model.get_decoder()(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            close = {"rel": 1e-4, "abs": 1e-5} if dtype == torch.float32 else {"abs": 0.05}
            assert scores[row].item() == pytest.approx(head(states[start:]).mean().item(), **close)
        # A row among others gives the bits that it gives alone.
        alone = torch.cat([trunk.scores(batch.select(torch.tensor([row]))) for row in range(len(batch))])
    assert torch.equal(alone, scores)

    trunk.copy_role("reward", "value")
    trunk.save_role("reward", tmp_path)
    trunk.load_role("loaded", tmp_path)
    for role in ("value", "loaded"):
        with torch.no_grad(), trunk.role(role):
            assert torch.equal(trunk.scores(batch), scores)


def test_a_fresh_head_is_drawn_as_the_papers_do() -> None:
    # N(0, 1/(H+1)): the standard error of a deviation over n draws is 1 / sqrt(2 n), 0.2 % here.
    head = ScalarHead(100_000, torch.Generator().manual_seed(0))
    assert head.weight.std().item() * 100_001**0.5 == pytest.approx(1, abs=0.01)
    assert head.weight.mean().item() * 100_001**0.5 == pytest.approx(0, abs=0.02)
    assert (head.bias.item(), head.shift.item(), head.scale.item()) == (0, 0, 1)


def test_the_same_name_twice_is_refused(make_trunk: MakeTrunk) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", LORA, seed=0)
    with pytest.raises(ValueError, match="'policy' is already there"):
        trunk.add_role("policy", LORA, seed=1)


@pytest.mark.parametrize("weights", ["lora"])
def test_last_layers_adapts_only_those(make_trunk: MakeTrunk) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", Lora(last_layers=1), seed=0)
    trunk.add_role("all", Lora(last_layers=2), seed=0)
    assert {name.split(".")[2] for name in trunk.parameters("policy")} == {"1"}
    assert {name.split(".")[2] for name in trunk.parameters("all")} == {"0", "1"}
    assert {name.split(".")[4] for name in trunk.parameters("policy")} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    with pytest.raises(ValueError, match="last_layers is 3, and the trunk has 2 layers"):
        trunk.add_role("more", Lora(last_layers=3), seed=0)


# Forward and backward


def gradients(trunk: Trunk, role: str, batch: TextBatch) -> dict[str, Tensor]:
    """The gradient that a simple loss gives to a role."""
    with trunk.role(role):
        numbers = trunk.logprobs(batch, 1.0)[0] if role == "policy" else trunk.values(batch)
        numbers.square().sum().backward()
    found = {name: p.grad for name, p in trunk.parameters(role).items()}
    assert [name for name, grad in found.items() if grad is None or not grad.any()] == []
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_two_roles_are_those_of_two_separate_runs(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype
) -> None:
    batch = make_batch([(5, 15), (30, 3), (70, 9)])
    together = trained(make_trunk, stir, dtype=dtype)
    policy, value = gradients(together, "policy", batch), gradients(together, "value", batch)
    assert_equal(gradients(trained(make_trunk, stir, dtype=dtype), "policy", batch), policy)
    assert_equal(gradients(trained(make_trunk, stir, dtype=dtype), "value", batch), value)


def test_a_backward_pass_reaches_its_own_role_and_nothing_else(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    gradients(trunk, "policy", make_batch([(5, 15)]))
    assert {name for name, p in trunk.parameters("value").items() if p.grad is not None} == set()
    own = {id(p) for p in trunk.parameters("policy").values()}
    assert [n for n, p in trunk.model.named_parameters() if p.grad is not None and id(p) not in own] == []


def test_nothing_can_be_trained_outside_of_a_role(make_trunk: MakeTrunk, stir: Stir) -> None:
    trunk = trained(make_trunk, stir)
    for role in trunk.roles:
        with trunk.role(role):
            assert all(p.requires_grad for p in trunk.parameters(role).values())
        assert not any(p.requires_grad for p in trunk.parameters(role).values())
    assert not any(p.requires_grad for p in trunk.model.parameters())


@pytest.mark.parametrize("what", ["logprobs", "values", "scores"])
def test_a_forward_pass_outside_of_a_role_is_refused(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, what: str
) -> None:
    trunk = trained(make_trunk, stir)
    args = (1.0,) if what == "logprobs" else ()
    with pytest.raises(RuntimeError, match="outside of"):
        getattr(trunk, what)(make_batch([(2, 3)]), *args)


def test_a_role_without_a_head_gives_no_numbers(make_trunk: MakeTrunk, make_batch: MakeBatch) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", LORA, seed=0)
    with trunk.role("policy"), pytest.raises(RuntimeError, match="'policy' has no head"):
        trunk.values(make_batch([(2, 3)]))


def test_a_role_inside_a_role_is_refused_and_the_outer_one_goes_on(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(5, 15)])
    with torch.no_grad(), trunk.role("policy"):
        wanted = trunk.logprobs(batch, 1.0)[0]
        with pytest.raises(RuntimeError, match="role 'value' inside 'policy'"), trunk.role("value"):
            pass
        with pytest.raises(RuntimeError, match="role 'new' added inside 'policy'"):
            trunk.add_role("new", LORA, seed=0)
        assert torch.equal(trunk.logprobs(batch, 1.0)[0], wanted)


def test_an_unknown_role_is_refused_by_name(make_trunk: MakeTrunk) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", LORA, seed=0)
    with pytest.raises(ValueError, match="no role 'polcy'; it has policy"), trunk.role("polcy"):
        pass


def test_a_trunk_is_as_good_as_new_after_an_exception_inside_a_role(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(make_trunk, stir)
    batch = make_batch([(5, 15)])
    wanted = numbers(trunk, batch)
    with pytest.raises(ZeroDivisionError), trunk.role("policy"):
        raise ZeroDivisionError
    assert not any(p.requires_grad for p in trunk.model.parameters())
    assert_equal(numbers(trunk, batch), wanted)


# A role as plain weights


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_role_says_nearly_the_same_and_the_trunk_gets_its_own_tensors_back(
    make_trunk: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype, fails: bool
) -> None:
    trunk = trained(make_trunk, stir, dtype=dtype)
    batch = make_batch(MIXED)
    wanted = numbers(trunk, batch, 1.0)["logprobs"]
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in trunk.model.named_parameters()}
    try:
        with trunk.merged("policy"):
            found = trunk.logprobs(batch, 1.0)[0]
            assert not found.requires_grad
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    else:  # bfloat16 has 8 bits: a log-probability of several nats, through two layers, moves by hundredths
        assert (found - wanted).abs().mean() < 0.1
    for name, p in trunk.model.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1]), name
    assert torch.equal(numbers(trunk, batch, 1.0)["logprobs"], wanted)


@pytest.mark.parametrize("weights", ["lora"])
def test_a_merge_that_fails_half_way_leaves_the_trunk_as_it_was(make_trunk: MakeTrunk, stir: Stir) -> None:
    trunk = trained(make_trunk, stir)
    before = {name: p.detach().clone() for name, p in trunk.model.named_parameters() if "lora" not in name}
    last = list(trunk.parameters("policy").values())[-1]
    last.data = last.data[:, :-1]  # of no fitting shape: every layer but this one can be merged
    with pytest.raises(RuntimeError), trunk.merged("policy"):
        pass
    after = dict(trunk.model.named_parameters())
    assert [name for name, kept in before.items() if not torch.equal(after[name], kept)] == []


# Families of models

SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": None, "eos_token_id": 257, "pad_token_id": 256}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    # Grouped queries, and an output layer of its own.
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, **IDS, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=False)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, **IDS, intermediate_size=64, num_key_value_heads=2)
    ),
    # Transposed layers, dropout by default, and learned positions that are no multiple of a bucket.
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=150, **IDS)
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path, weights: Weights) -> Callable[..., Trunk]:
    """Makes trunks of one family from a saved folder."""
    folder = tmp_path / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[request.param]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)

    def make(dtype: torch.dtype = torch.float32) -> Trunk:
        return Trunk(load_base(FolderModel(path=str(folder)), dtype), "f" * 64, weights=weights)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_family_a_rows_numbers_are_its_own_to_the_bit(
    family: MakeTrunk, make_batch: MakeBatch, stir: Stir, dtype: torch.dtype
) -> None:
    trunk = trained(lambda: family(dtype), stir)
    batch = make_batch(MIXED)
    together = numbers(trunk, batch)
    trunk.micro_batch_tokens = 64
    assert_equal(numbers(trunk, batch), together)


def test_in_every_family_logprobs_are_those_of_a_plain_forward_pass(
    family: MakeTrunk, make_batch: MakeBatch, stir: Stir
) -> None:
    trunk = trained(family, stir)
    batch = make_batch([(12, 20)])
    ids = torch.cat([batch.query_ids, batch.response_ids], 1)
    with torch.no_grad(), trunk.role("policy"):
        p = (trunk.model(input_ids=ids).logits / 0.7).log_softmax(-1)
        wanted = p[0, 11:-1].gather(-1, ids[0, 12:, None]).squeeze(-1)  # the 12th token foretells the 13th
        torch.testing.assert_close(trunk.logprobs(batch, 0.7)[0][0], wanted, rtol=1e-5, atol=1e-5)


def test_in_every_family_a_role_is_trained_merged_saved_and_loaded(
    family: MakeTrunk, make_batch: MakeBatch, stir: Stir, tmp_path: Path
) -> None:
    trunk = trained(family, stir)
    batch = make_batch([(12, 20), (100, 50)])  # the second fills the whole context of GPT-2
    wanted = numbers(trunk, batch)
    gradients(trunk, "policy", batch)
    with trunk.merged("policy"):
        torch.testing.assert_close(trunk.logprobs(batch, 0.7)[0], wanted["logprobs"], rtol=0, atol=1e-4)
    other = family()
    for role in ("policy", "value"):
        (tmp_path / role).mkdir()
        trunk.save_role(role, tmp_path / role)
        other.load_role(role, tmp_path / role)
    assert_equal(numbers(other, batch), wanted)


def test_in_every_family_nothing_is_dropped_out(family: MakeTrunk, make_batch: MakeBatch, stir: Stir) -> None:
    trunk = trained(family, stir)
    batch = make_batch([(12, 20)])
    wanted = numbers(trunk, batch)
    trunk.model.train()
    assert_equal(numbers(trunk, batch), wanted)
    assert [m for m in trunk.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0] == []


def test_a_model_that_changes_its_logits_after_the_output_layer_is_refused() -> None:
    # Gemma 2 caps its logits: log-probabilities of the uncapped ones would be another distribution's.
    config = Gemma2Config(**SIZES, **IDS, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    with torch.random.fork_rng():
        model = Gemma2ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="a Gemma2ForCausalLM changes its logits after the output layer"):
        Trunk(Base(model, byte_tokenizer()), "f" * 64)


def test_a_row_longer_than_the_context_is_refused(make_trunk: MakeTrunk, make_batch: MakeBatch) -> None:
    trunk = make_trunk(model=TinyModel(hidden_size=32, num_layers=1, context_length=100))
    trunk.add_role("policy", LORA, seed=0)
    with (
        trunk.role("policy"),
        pytest.raises(ValueError, match="a row has 101 tokens, and the model takes 100"),
    ):
        trunk.logprobs(make_batch([(50, 51)]), 1.0)
