"""The door to the stages: a job in, artifacts out.

A stage knows no Prefect, no MLflow and no other stage's insides.
"""

import importlib
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from rlhf_core.artifacts import ArtifactRef, Recipe, Store, recipe_key, replace
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.metrics import Spool, SpoolEnds
from rlhf_core.settings import Json
from rlhf_core.stages.context import Job, StageContext

STAGES = (
    "bootstrap",
    "prompts",
    "rollouts",
    "pairing",
    "preferences",
    "reward_modeling",
    "reward_validation",
    "policy_update",
    "measurement",
    "comparison",
    "promotion",
    "rebase",
)


class Stage(Protocol):
    """A module of this package."""

    NAME: str
    VERSION: int
    """Raised by hand when the same recipe would give another result."""

    def run(self, context: StageContext) -> None:
        """Read inputs, write outputs, tell numbers."""


def stage(name: str) -> Stage:
    """The stage of that name."""
    if name not in STAGES:
        raise ValueError(f"there is no stage {name!r}; the stages are {', '.join(STAGES)}")
    return cast(Stage, importlib.import_module(f"rlhf_core.stages.{name}"))


def job_key(name: str, settings: Mapping[str, Json], inputs: Mapping[str, ArtifactRef], seed: int) -> str:
    """The name of this piece of work."""
    return recipe_key(name, stage(name).VERSION, settings, inputs, seed)


def run_job(job: Job) -> Recipe:
    """Do the job, or find it done; its recipe names what came out, in the work folder's `result.json` too."""
    from rlhf_core import __version__
    from rlhf_core.stages.fingerprint import fingerprint

    store = Store(Path(job.store))
    key = job_key(job.stage, job.settings, job.inputs, job.seed)
    done = store.recipe(key)
    if done is None:
        work = Path(job.work)
        belongs_to = {"key": key, **{role: ref.digest for role, ref in job.inputs.items()}}
        checkpoints = Checkpoints(work / "checkpoints", belongs_to, job.execution.checkpoint_steps)
        # What a killed attempt told is kept up to its checkpoint; without one this attempt starts over.
        spool = Spool(work, checkpoints.last.spool if checkpoints.last else SpoolEnds())
        for sentence in checkpoints.unusable:
            spool.alarm(sentence)
        started = time.time()
        context = StageContext(job, store, spool, checkpoints, key)
        stage(job.stage).run(context)
        told: dict[str, Json] = {
            "metrics": dict(context.metrics),
            "alarms": list(spool.alarms),
            "seconds": time.time() - started,
            "execution": job.execution.to_json(),
            "fingerprint": fingerprint(f"rlhf_core.stages.{job.stage}"),
            "host": platform.node(),
            "process": os.getpid(),
            "version": __version__,
        }
        done = store.record(
            Recipe(
                stage=job.stage,
                version=stage(job.stage).VERSION,
                key=key,
                settings=job.settings,
                seed=job.seed,
                inputs=job.inputs,
                outputs=context.outputs,
                told=told,
            )
        )
        shutil.rmtree(checkpoints.folder, ignore_errors=True)
    Path(job.work).mkdir(parents=True, exist_ok=True)
    replace(Path(job.work) / "result.json", done.model_dump_json().encode())
    return done
