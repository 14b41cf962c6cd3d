"""Bad input is refused in a sentence, with code 2, before anything is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app

RUN_FILE = Path(__file__).parents[2] / "infra" / "runs" / "tiny-cpu.yaml"


def refused(tmp_path: Path, *arguments: str) -> str:
    home = tmp_path / "home"
    done = CliRunner().invoke(app, ["run", *arguments, "--home", str(home), "--json"])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert not home.exists()
    return done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy_update.algorithm.learning_rat=1e-4", "did you mean `learning_rate`"),
        ("rollout.completions_per_prompt=2", "did you mean `rollouts`"),
        ("seed=soon", "seed"),
        ("policy_update.algorithm.gamma=1.5", "less than or equal to 1"),
        ("policy_update.algorithm.learning_rate=.nan", "learning_rate"),
        ("policy_update.algorithm.num_minibatches=7", "64 = 7 * 9 + 1"),
        ("policy_update.algorithm.type=pop", "pop"),
        ("bootstrap.base={type: folder, path: nowhere}", "nowhere"),
        ("prompt_source={type: file, path: nothing.jsonl}", "nothing.jsonl"),
        ("prompts.held_out=100000", "held_out pool"),
        ("promotion.gates=[{metric: eval/proxy_after, direction: above, bound: 0}]", "trained to please"),
        ("project=../elsewhere", "project"),
        ("no equals sign", "path.to.setting=value"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_written(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(tmp_path, str(RUN_FILE), "--set", override)


def test_a_missing_run_file_is_refused(tmp_path: Path) -> None:
    assert "there is no run file" in refused(tmp_path, str(tmp_path / "none.yaml"))


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    said = refused(tmp_path, str(RUN_FILE), "--set", f"prompt_source={{type: file, path: {prompts}}}")
    assert str(prompts) in said


def test_duplicate_prompt_ids_are_refused_with_their_lines(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n % 300}", "text": f"The number {n} is"} for n in range(301)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    said = refused(tmp_path, str(RUN_FILE), "--set", f"prompt_source={{type: file, path: {prompts}}}")
    assert "p0" in said and "301" in said
