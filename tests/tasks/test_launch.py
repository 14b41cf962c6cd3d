"""A job gives the same in this process and in a fresh one, and a fresh one does not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest

from rlhf_core.artifacts import Recipe, Store
from rlhf_core.records import Completion, StopReason
from rlhf_core.settings import Execution
from rlhf_core.sources import write_rows
from rlhf_core.stages.context import Job
from tasks.launch import StageFailed, launch

Launcher = Literal["inline", "process"]
LAUNCHERS: tuple[Launcher, ...] = ("inline", "process")


def pairing_job(root: Path, launcher: Launcher, texts: list[str]) -> Job:
    """A job that pairs the completions of one prompt, in a store of its own."""
    store = Store(root / "store")
    completions = [
        Completion(
            id=f"p/{k}",
            prompt_id="p",
            prompt_text="?",
            prompt_ids=[1],
            response_ids=[2],
            text=text,
            stop=StopReason.LENGTH,
        )
        for k, text in enumerate(texts)
    ]
    with store.writing() as folder:
        write_rows(completions, folder / "completions.parquet")
        ref = store.commit(folder, "completions", "by hand")
    (root / "work").mkdir()
    return Job(
        stage="pairing",
        settings={"pairs_per_prompt": 0},
        inputs={"completions": ref},
        seed=1,
        execution=Execution(launcher=launcher),
        store=str(store.root),
        work=str(root / "work"),
    )


def test_both_launchers_give_one_recipe(tmp_path: Path) -> None:
    recipes: list[Recipe] = []
    for launcher in LAUNCHERS:
        looks: list[int] = []
        (tmp_path / launcher).mkdir()
        job = pairing_job(tmp_path / launcher, launcher, ["a", "b", "c"])
        recipes.append(launch(job, lambda looks=looks: looks.append(1)))  # type: ignore[misc]
        assert looks
        assert (Path(job.work) / "result.json").exists()
    inline, process = (recipe.model_dump(exclude={"told"}) for recipe in recipes)
    assert inline == process
    pids = [recipe.told["process"] for recipe in recipes]
    assert pids[0] == os.getpid() != pids[1]


def test_a_stage_that_fails_here_raises_its_own_error(tmp_path: Path) -> None:
    looks: list[int] = []
    with pytest.raises(ValueError, match="2 completions give no pair"):
        launch(pairing_job(tmp_path, "inline", ["same", "same"]), lambda: looks.append(1))
    assert looks  # what it told before it failed is passed on


def test_a_stage_that_fails_in_a_process_says_so_with_the_end_of_its_log(tmp_path: Path) -> None:
    job = pairing_job(tmp_path, "process", ["same", "same"])
    with pytest.raises(StageFailed) as failed:
        launch(job, lambda: None)
    assert "stage pairing ended with code 1" in str(failed.value)
    assert str(tmp_path / "work" / "stage.log") in str(failed.value)
    assert "ValueError: 2 completions give no pair to compare" in str(failed.value)


def test_an_old_result_is_not_taken_for_that_of_a_failed_process(tmp_path: Path) -> None:
    job = pairing_job(tmp_path, "process", ["same", "same"])
    (tmp_path / "work" / "result.json").write_text("{}")
    with pytest.raises(StageFailed):
        launch(job, lambda: None)
    assert not (tmp_path / "work" / "result.json").exists()


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "rlhf_core.stages", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""


def test_a_stage_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    # A job file that is a pipe nobody writes to: the stage starts, and waits for its job for ever.
    job = tmp_path / "job.json"
    os.mkfifo(job)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(job)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        with job.open("wb"):  # opens once the stage reads
            assert child.is_running()
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            deadline = time.monotonic() + 3
            while lives(child) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not lives(child)


def lives(process: psutil.Process) -> bool:
    """Whether a process still runs; one that nobody has collected yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
