from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from rlhf_core.settings import Execution, InvalidSettings, Settings, exact_div, merge, parse_settings


class PPO(Settings):
    type: Literal["ppo"] = "ppo"
    """The clipped objective."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Step size of the policy."""
    clip_range: float = 0.2
    """How far the ratio may move."""


class Model(Settings):
    type: Literal["model"] = "model"
    """A learned reward."""
    model: Literal["small", "large"] = "small"
    """A field called as its own `type`."""
    temperature: float = 1.0
    """Of the scores."""


Member = Annotated[PPO | Model, Field(discriminator="type")]


class Update(Settings):
    algorithm: Member = PPO()
    """What learns."""
    rewards: tuple[Member, ...] = ()
    """What is learned from."""
    fallback: Member | None = None
    """What learns otherwise."""
    named: dict[str, Member] = Field(default_factory=dict)
    """Members by name."""


class Run(Settings):
    policy_update: Update = Update()
    """How the policy learns."""
    rounds: int = Field(default=2, ge=1)
    """How many rounds."""


def refusal(values: dict) -> str:
    with pytest.raises(InvalidSettings) as error:
        parse_settings(Run, values)
    return str(error.value)


def test_settings_are_frozen_and_describe_their_fields() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Run().rounds = 3  # type: ignore[misc]
    assert Run.model_fields["rounds"].description == "How many rounds."


def test_defaults_are_written_out_and_read_back() -> None:
    written = Run().to_json()
    assert written["policy_update"]["algorithm"] == {"type": "ppo", "learning_rate": 1e-4, "clip_range": 0.2}
    assert parse_settings(Run, written) == Run()


def test_a_bad_default_is_refused_where_it_is_written() -> None:
    class Bad(Settings):
        rounds: int = Field(default=0, ge=1)
        """Never valid."""

    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Bad()


@pytest.mark.parametrize("where", ["algorithm", "fallback"])
def test_the_closest_key_of_a_unions_member_is_named(where: str) -> None:
    message = refusal({"policy_update": {where: {"type": "ppo", "lerning_rate": 1}}})
    assert message == f"policy_update.{where}.lerning_rate: unknown key; did you mean `learning_rate`?"


def test_only_keys_of_the_chosen_member_are_offered() -> None:
    # `temperature` exists, but in the other member.
    message = refusal({"policy_update": {"algorithm": {"type": "ppo", "temperature": 1}}})
    assert message.endswith("unknown key; known keys: clip_range, learning_rate, type")


def test_the_closest_key_is_named_inside_lists_and_mappings() -> None:
    member = {"type": "model", "temprature": 1}
    assert refusal({"policy_update": {"rewards": [{"type": "ppo"}, member], "named": {"main": member}}}) == (
        "policy_update.rewards.1.temprature: unknown key; did you mean `temperature`?\n"
        "policy_update.named.main.temprature: unknown key; did you mean `temperature`?"
    )


def test_a_field_called_like_its_members_type_keeps_its_place() -> None:
    message = refusal({"policy_update": {"algorithm": {"type": "model", "model": "huge"}}})
    assert message == "policy_update.algorithm.model: Input should be 'small' or 'large' (given: 'huge')"


def test_the_closest_key_at_the_top_is_named() -> None:
    assert refusal({"round": 3}) == "round: unknown key; did you mean `rounds`?"


def test_a_key_unlike_any_lists_the_known_ones() -> None:
    assert refusal({"zzz": 3}) == "zzz: unknown key; known keys: policy_update, rounds"


def test_an_unknown_member_names_the_known_ones() -> None:
    message = refusal({"policy_update": {"algorithm": {"type": "pp0"}}})
    assert message.startswith("policy_update.algorithm: ")
    assert "'pp0'" in message and "'ppo', 'model'" in message


def test_every_mistake_has_a_line_with_the_value_given() -> None:
    values = {"rounds": 0, "policy_update": {"algorithm": {"type": "ppo", "learning_rate": "fast"}}}
    lines = sorted(refusal(values).splitlines())
    assert len(lines) == 2
    assert lines[0].startswith("policy_update.algorithm.learning_rate: ") and "'fast'" in lines[0]
    assert lines[1] == "rounds: Input should be greater than or equal to 1 (given: 0)"


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(rate: float) -> None:
    assert "finite" in refusal({"policy_update": {"algorithm": {"type": "ppo", "learning_rate": rate}}})


def test_execution_defaults_choose_nothing_silently() -> None:
    assert Execution().to_json() == {
        "launcher": "inline",
        "device": "auto",
        "num_threads": 0,
        "tokens_per_micro_batch": 2048,
        "checkpoint_steps": 5,
        "tracking_seconds": 60.0,
    }


def test_exact_div_by_hand() -> None:
    assert exact_div(12, 4, "batch") == 3


def test_exact_div_says_the_numbers_and_what_to_do() -> None:
    with pytest.raises(ValueError) as error:
        exact_div(10, 4, "minibatches of a batch")
    assert str(error.value) == (
        "minibatches of a batch: 10 does not split into 4 equal parts (10 = 4 * 2 + 2): "
        "a short last part would get a larger step. Choose a divisor of 10."
    )


@pytest.mark.parametrize(("total", "parts"), [(2, 4), (0, 4), (4, 0), (4, -2)])
def test_exact_div_refuses_empty_and_impossible_parts(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{total} does not split into {parts} equal parts"):
        exact_div(total, parts, "batch")


def test_merge_goes_into_mappings_and_leaves_the_rest() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert merge(base, {"a": {"c": {"d": 3}}, "e": [4]}) == {"a": {"b": 1, "c": {"d": 3}}, "e": [4]}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}


def test_merge_keeps_a_member_whose_type_stays() -> None:
    base = {"algorithm": {"type": "ppo", "clip_range": 0.1, "learning_rate": 1.0}}
    assert merge(base, {"algorithm": {"learning_rate": 2.0}}) == {
        "algorithm": {"type": "ppo", "clip_range": 0.1, "learning_rate": 2.0}
    }
    named = {"algorithm": {"type": "ppo", "learning_rate": 2.0}}
    assert merge(base, named)["algorithm"] == {"type": "ppo", "clip_range": 0.1, "learning_rate": 2.0}


def test_merge_replaces_a_member_of_another_type_whole() -> None:
    base = {"algorithm": {"type": "ppo", "clip_range": 0.1}}
    assert merge(base, {"algorithm": {"type": "model"}}) == {"algorithm": {"type": "model"}}
    parse_settings(Update, merge(base, {"algorithm": {"type": "model"}}))


def test_merge_can_take_a_mapping_away_and_put_one_in() -> None:
    assert merge({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert merge({"a": None}, {"a": {"b": 1}}) == {"a": {"b": 1}}


trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@given(mappings, mappings, mappings)
def test_merge_has_a_unit_is_idempotent_and_the_last_word_wins(a: dict, b: dict, c: dict) -> None:
    assert merge(a, {}) == a == merge({}, a)
    assert merge(merge(a, b), b) == merge(a, b)
    assert all(merge(a, b)[key] == b[key] for key in b if not isinstance(b[key], dict))
    assert set(merge(merge(a, b), c)) == {*a, *b, *c}
