"""The commands beside `run`, on a home with two tiny rounds, as a user types them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def rlhf(*arguments: str, typed: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
    )


def sample(home: Path, *arguments: str) -> list[dict[str, str]]:
    done = rlhf("sample", *arguments, "--home", str(home), "--json", "--max-new-tokens", "16")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)["samples"]
    return found


def test_two_policies_are_sampled_side_by_side_with_the_same_random_numbers(
    first: dict[str, Any], home: Path
) -> None:
    found = sample(home, "tiny", "The weather is", "--against", "tiny@initial", "-n", "2")
    assert [set(one) for one in found] == [{"prompt", "tiny@champion", "tiny@initial"}] * 2
    assert {one["prompt"] for one in found} == {"The weather is"}
    assert found[0]["tiny@initial"] != found[1]["tiny@initial"]
    assert any(one["tiny@champion"] != one["tiny@initial"] for one in found)
    assert sample(home, "tiny", "The weather is", "--against", "tiny@initial", "-n", "2") == found


def test_a_version_of_the_registry_is_the_policy_of_its_round(first: dict[str, Any], home: Path) -> None:
    by_version = sample(home, "tiny:2", "The weather is", "-n", "1")[0]
    by_round = sample(home, "tiny@round-1", "The weather is", "-n", "1")[0]
    assert by_version["tiny:2"] == by_round["tiny@round-1"]
    none = rlhf("sample", "tiny:9", "So", "--home", str(home))
    assert none.returncode == 2 and "no policy version 9" in none.stderr


def test_without_a_prompt_the_projects_held_out_prompts_are_answered(
    first: dict[str, Any], home: Path
) -> None:
    found = sample(home, "tiny", "-n", "3")
    assert len({one["prompt"] for one in found}) == 3
    shown = rlhf("sample", "tiny", "-n", "1", "--home", str(home), "--max-new-tokens", "8")
    assert found[0]["prompt"] in shown.stdout and "tiny@champion" in shown.stdout
    # Bytes of an untrained model steer terminals; none of them gets there.
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown.stdout)


def test_a_chat_goes_on_until_it_is_longer_than_the_context(first: dict[str, Any], home: Path) -> None:
    asked = ["chat", "tiny", "--home", str(home), "--max-new-tokens", "8"]
    done = rlhf(*asked, typed="Hello\n" + "x" * 128 + "\n")
    assert done.returncode == 2
    assert "Hello" in done.stdout and "leave no room for 8 new tokens" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_ends_with_its_input(first: dict[str, Any], home: Path) -> None:
    done = rlhf(
        "chat", "tiny", "--against", "tiny@initial", "--home", str(home), typed="/reset\n/quit\nmore\n"
    )
    assert done.returncode == 0, done.stderr
    assert "tiny@champion and tiny@initial" in done.stdout and "A new conversation." in done.stdout


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def test_ui_serves_both_pages_until_it_is_told_to_end(first: dict[str, Any], home: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "ui", "--home", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as ui:
        assert ui.stdout is not None
        lines = [ui.stdout.readline() for _ in range(3)]
        pages = dict(line.split(maxsplit=1) for line in lines[:2])
        prefect, mlflow = pages["Prefect"].strip(), pages["MLflow"].strip()
        assert all(page.startswith("http://127.0.0.1:") for page in (prefect, mlflow))
        assert mlflow.endswith(
            "workflowType=machine_learning"
        )  # else MLflow shows traces, of which there are none
        assert "<title>" in fetch(prefect)
        names = fetch(
            f"{mlflow.partition('/#')[0]}/api/2.0/mlflow/experiments/get-by-name?experiment_name=tiny"
        )
        assert json.loads(names)["experiment"]["name"] == "tiny"
        # A second one over the same home shares both.
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as second:
            assert second.stdout is not None
            assert [second.stdout.readline() for _ in range(3)] == lines
            os.kill(second.pid, signal.SIGINT)
            assert second.wait(timeout=30) == 0
        assert "<title>" in fetch(prefect)
        os.kill(ui.pid, signal.SIGINT)
        assert ui.wait(timeout=60) == 0
    for page in (prefect, mlflow):
        with pytest.raises(OSError):
            fetch(page)


def test_a_port_in_use_is_refused_before_anything_is_served(first: dict[str, Any], home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = rlhf("ui", "--home", str(home), "--mlflow-port", port)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be had for the MLflow page" in done.stderr
    assert "Traceback" not in done.stderr


def test_ui_over_a_folder_without_projects_is_refused(tmp_path: Path) -> None:
    done = rlhf("ui", "--home", str(tmp_path / "none"))
    assert done.returncode == 2 and "holds no project" in done.stderr
    assert not (tmp_path / "none").exists()


def test_help_and_version_answer_without_importing_anything_heavy() -> None:
    script = """
import sys
from flows.cli import app
try:
    app(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "prefect", "mlflow", "datasets", "pydantic", "numpy", "matplotlib"}
    print("imported:", sorted(heavy & set(sys.modules)))
"""
    for asked, said in (("--help", "Commands"), ("--version", "rlhf-rounds ")):
        done = subprocess.run(
            [sys.executable, "-c", script, asked], capture_output=True, text=True, check=True
        )
        assert said in done.stdout
        assert done.stdout.endswith("imported: []\n")
