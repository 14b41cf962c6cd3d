"""A run file with what is laid over it: read as YAML, refused in a sentence."""

from pathlib import Path

import pytest

from flows.settings import MAX_SEED, RunSettings, load_run_file
from rlhf_core.models import TinyModel
from rlhf_core.rewards import LengthWindow
from rlhf_core.settings import InvalidSettings, merge

RUNS = Path(__file__).parents[2] / "infra" / "runs"
TINY = RUNS / "tiny-cpu.yaml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_run_file_is_a_run(path: Path) -> None:
    run = load_run_file(path)
    assert RunSettings.model_validate(run.to_json()) == run


def test_an_override_is_read_as_yaml() -> None:
    # YAML itself takes 1e-4, which has no point, for a text.
    run = load_run_file(
        TINY,
        [
            "policy_update.algorithm.learning_rate=1e-4",
            "policy_update.algorithm.value_clip_range=null",
            "policy_update.algorithm.num_steps=3",
            "project=a-b",
        ],
    )
    algorithm = run.policy_update.algorithm
    assert (algorithm.learning_rate, algorithm.value_clip_range, algorithm.num_steps) == (1e-4, None, 3)
    assert isinstance(algorithm.learning_rate, float)
    assert run.project == "a-b"
    # What was not named stays as the file has it.
    assert algorithm.value_learning_rate == load_run_file(TINY).policy_update.algorithm.value_learning_rate


def test_a_later_override_wins() -> None:
    assert load_run_file(TINY, ["seed=1", "seed=2"]).seed == 2
    assert load_run_file(TINY, [f"seed={MAX_SEED}"]).seed == MAX_SEED


def test_a_value_may_hold_an_equals_sign() -> None:
    run = load_run_file(TINY, ["policy_update.watched.pattern='a=b'"])
    assert run.policy_update.watched is not None
    assert run.policy_update.watched.to_json()["pattern"] == "a=b"


def test_a_changed_type_drops_the_other_members_keys() -> None:
    old = {"gold": {"type": "regex", "pattern": "a"}, "kept": 1}
    new = {"gold": {"type": "length_window", "min_tokens": 1}}
    assert merge(old, new) == {"gold": {"type": "length_window", "min_tokens": 1}, "kept": 1}
    assert merge(old, {"gold": {"type": "regex", "mode": "count"}}) == {
        "gold": {"type": "regex", "pattern": "a", "mode": "count"},
        "kept": 1,
    }
    run = load_run_file(TINY, ["policy_update.watched={type: length_window, min_tokens: 2, max_tokens: 4}"])
    assert run.policy_update.watched == LengthWindow(min_tokens=2, max_tokens=4)
    assert isinstance(load_run_file(TINY).bootstrap.base, TinyModel)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "evals.win_rate.annotator.gold.patern=x",
            "evals.win_rate.annotator.gold.patern: unknown key; did you mean `pattern`",
        ),
        ("policy_update.sampling.max_tokens=4", "policy_update.sampling.max_tokens: unknown key"),
        ("policy_update.sampling.top_p=0.9", "policy_update.sampling: top_p: samples would come"),
        ("rollouts.sampling={top_k: 5}", "rollouts.sampling: top_k: samples would come"),
        ("prompts.labelling.more=1", "prompts.labelling"),
        (f"seed={MAX_SEED + 1}", "seed"),
        ("seed=-1", "greater than or equal to 0"),
        ("project=With Capitals", "project: String should match pattern"),
        ("=1", "write it as path.to.setting=value"),
        ("a..b=1", "write it as path.to.setting=value"),
        ("seed=[1", "the value is not YAML"),
        ("reward_model.prompts_per_minibatch=200", "no step would be taken"),
    ],
)
def test_what_is_wrong_is_named_where_it_was_written(override: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        load_run_file(TINY, [override])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "must hold settings by name, and holds list"),
        ("just words", "holds str"),
        ("", "holds NoneType"),
        ("a: [1", "is not YAML"),
        ("seed: 1\n", "project"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        load_run_file(written(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSettings, match="is not YAML"):
        load_run_file(path)
    with pytest.raises(InvalidSettings, match="there is no run file"):
        load_run_file(tmp_path)


def test_rates_meant_for_adapters_are_doubted_where_all_weights_are_trained() -> None:
    assert load_run_file(TINY).doubts() == []
    plain = (
        "bootstrap.weights=full",
        "bootstrap.lora={rank: 16, alpha: 32}",
        "reward_model.lora={rank: 16, alpha: 32}",
    )
    (doubt,) = load_run_file(TINY, plain).doubts()
    for rate in (
        "policy_update.algorithm.learning_rate 0.01",
        "policy_update.algorithm.value_learning_rate 0.01",
        "reward_model.optimizer.learning_rate 0.005",
    ):
        assert rate in doubt
    slow = (
        "policy_update.algorithm.learning_rate=1.0e-5",
        "policy_update.algorithm.value_learning_rate=1.0e-4",  # the bound itself
        "reward_model.num_epochs=0",  # its rate is used by nothing
    )
    assert load_run_file(TINY, [*plain, *slow]).doubts() == []


def test_settings_that_full_weights_do_not_use_or_lose_by_are_doubted() -> None:
    slow = (
        "policy_update.algorithm={learning_rate: 1.0e-5, value_learning_rate: 1.0e-5}",
        "reward_model.num_epochs=0",
    )
    run = load_run_file(TINY, ["bootstrap.weights=full", "bootstrap.dtype=bfloat16", *slow])
    assert [doubt.partition(",")[0] for doubt in run.doubts()] == ["bootstrap.weights is full"] * 2
    lost, unused = run.doubts()
    assert "dtype is bfloat16" in lost
    assert "bootstrap.lora and reward_model.lora: set, and used by nothing" in unused


def test_a_slice_that_the_policys_prompts_cannot_spare_is_refused_before_a_round() -> None:
    fewer = ["prompts.policy=60", "policy_update.algorithm.candidate=best"]
    with pytest.raises(InvalidSettings, match="candidate_prompts 32 of 60 policy prompts: only 28 would be"):
        load_run_file(TINY, fewer)
    assert load_run_file(TINY, [*fewer, "policy_update.algorithm.candidate_prompts=30"]).prompts.policy == 60
