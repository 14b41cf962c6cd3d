"""What a round's run says of what it ran on, and what it keeps to itself."""

import getpass
import platform
import subprocess
from pathlib import Path

import pytest

from tasks.environment import environment, git_state


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_commit_and_whether_tracked_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked.py").write_text("")
    assert git_state(tmp_path / "code.py") == (commit, False)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert git_state(tmp_path / "code.py") == (commit, True)
    # What is installed inside somebody's repository was not checked out from it.
    assert git_state(tmp_path / "untracked.py") == ("", False)


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path(__file__)) == ("", False)


def test_versions_are_sorted_and_nothing_names_a_machine_or_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t-value")
    around = environment("cpu")
    assert around.packages == sorted(around.packages)
    assert any(package.startswith("mlflow==") for package in around.packages)
    text = around.model_copy(update={"packages": []}).model_dump_json()
    assert "s3cr3t-value" not in text and str(Path.cwd()) not in text
    assert platform.node() not in text and f'"{getpass.getuser()}"' not in text
