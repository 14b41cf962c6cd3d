"""Runs a job: in this process or in a fresh one, while somebody looks at its spool."""

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rlhf_core.artifacts import Recipe
from rlhf_core.stages import run_job
from rlhf_core.stages.context import Job

TICK_SECONDS = 0.5
LOG_LINES = 30


class StageFailed(RuntimeError):
    """A stage's process ended without a result."""


def launch(job: Job, look: Callable[[], None]) -> Recipe:
    """The result of a job; `look` is called every half second meanwhile, and once more at the end."""
    try:
        return {"inline": _inline, "process": _process}[job.execution.launcher](job, look)
    finally:
        look()


def _inline(job: Job, look: Callable[[], None]) -> Recipe:
    done = threading.Event()

    def keep_looking() -> None:
        while not done.wait(TICK_SECONDS):
            look()

    watcher = threading.Thread(target=contextvars.copy_context().run, args=(keep_looking,), daemon=True)
    watcher.start()
    try:
        return run_job(job)
    finally:
        done.set()
        watcher.join()


def _process(job: Job, look: Callable[[], None]) -> Recipe:
    work = Path(job.work)
    (work / "job.json").write_text(job.model_dump_json(indent=1))
    (work / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "rlhf_core.stages", str(work / "job.json"), str(os.getpid())]
    with (work / "stage.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                look()
                try:
                    process.wait(TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(10)
    if process.returncode != 0:
        tail = (work / "stage.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise StageFailed(
            f"stage {job.stage} ended with code {process.returncode}; the end of its log "
            f"({work / 'stage.log'}):\n" + "\n".join(tail)
        )
    return Recipe.model_validate_json((work / "result.json").read_bytes())
