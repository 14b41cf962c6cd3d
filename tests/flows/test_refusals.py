"""Bad input is refused in a sentence, with code 2, before anything is written."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from flows.cli import app
from flows.console import ConsoleDisplay
from flows.loop import alone

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


@pytest.mark.slow
def test_a_prompt_that_is_longer_than_the_context_is_refused_before_a_round_is_opened(tmp_path: Path) -> None:
    prompts, home = tmp_path / "prompts.jsonl", tmp_path / "home"
    rows = [{"id": f"p{n}", "text": f"The number {n} is"} for n in range(1000)] + [
        {"id": "long", "text": "x" * 113}
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    override = f"prompt_source={{type: file, path: {prompts}}}"
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(RUN_FILE), "--set", override, "--home", str(home)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    # A byte is a token: 113 and 16 new ones are one more than the context of 128.
    assert "16 new tokens in a context of 128: long (113 tokens)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(home.glob("projects/tiny/ledger/0001"))


def test_a_home_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text('{"format": 99, "version": "9.9"}')
    done = CliRunner().invoke(app, ["run", str(RUN_FILE), "--home", str(tmp_path)])
    assert done.exit_code == 2 and "written by rlhf-rounds 9.9" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home.json"]


def test_a_second_run_of_one_project_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "projects").mkdir()
    with FileLock(tmp_path / "projects" / ".tiny.lock"):
        done = CliRunner().invoke(app, ["run", str(RUN_FILE), "--home", str(tmp_path)])
    assert done.exit_code == 2 and "another command is playing project 'tiny'" in done.stderr


def test_a_second_run_that_may_wait_goes_on_when_the_first_has_ended(tmp_path: Path) -> None:
    (tmp_path / "projects").mkdir()
    display = ConsoleDisplay()
    entered = threading.Event()

    def enter() -> None:
        with alone(tmp_path, "tiny", display, wait=True):
            entered.set()

    waiting = threading.Thread(target=enter)
    with FileLock(tmp_path / "projects" / ".tiny.lock"):
        waiting.start()
        assert not entered.wait(timeout=0.3)
    assert entered.wait(timeout=10)
    waiting.join()


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


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "response": ""}, "1 of 21 rows refused"),
        ({"prompt": "p", "response": "r" * 128}, "1 of 21 demonstrations have more than 128 tokens"),
        ({"prompt": "p", "answer": "r"}, "1 of 21 rows refused"),
    ],
)
def test_demonstrations_that_cannot_be_learned_from_are_refused(
    tmp_path: Path, row: dict[str, str], said: str
) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [*({"prompt": f"p{n}", "response": "r"} for n in range(20)), row]
    file.write_text("\n".join(map(json.dumps, rows)))
    sft = f"bootstrap.sft={{demonstrations: {{type: file, path: {file}}}, demonstrations_per_minibatch: 4}}"
    assert said in refused(tmp_path, str(RUN_FILE), "--set", sft)
