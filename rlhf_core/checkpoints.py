"""Checkpoints inside a stage: a run that is killed goes on from the last one, to the same bits.

    checkpoints/000005/policy.safetensors     float32 masters and both moments of a role's optimiser
    checkpoints/000005/state.json             what it belongs to, the algorithm's state, the spool's length

Random draws are counted by step, so none is saved. Knows no algorithm, and torch only to read and write.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.artifacts import hash_file, sync_tree
from rlhf_core.metrics import Spool, SpoolEnds
from rlhf_core.settings import Json, Settings

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
KEPT = 2
STATE, WRITING = "state.json", ".writing"


class Checkpoint(Settings):
    """What `state.json` says."""

    version: int = SCHEMA
    """Of this file's own form."""
    belongs_to: dict[str, str]
    """The stage's key and the digests of its inputs, reward model and reference among them."""
    step: int
    """Steps that were taken."""
    state: dict[str, Json]
    """Of the algorithm: its controllers."""
    spool: SpoolEnds
    """How much of the spool was written before."""
    files: dict[str, str]
    """Their sha256."""


class Checkpoints:
    """The checkpoints of one stage; the last two are kept, so that a damaged one costs steps, not the run."""

    def __init__(self, folder: Path, belongs_to: Mapping[str, str], every: int) -> None:
        self.folder = folder
        self.belongs_to = dict(belongs_to)
        self.every = every
        self.unusable: list[str] = []
        """Of each checkpoint that was found and is not used, a sentence that says why."""
        self.last = self._find()
        """What the stage goes on from, if there is anything."""

    def tensors(self, role: str) -> "dict[str, Tensor]":
        """What the last checkpoint has of a role."""
        from safetensors.torch import load_file

        assert self.last is not None
        return load_file(self._at(self.last.step) / f"{role}.safetensors")

    def due(self, step: int) -> bool:
        """Whether one is due after so many steps."""
        return self.every > 0 and step % self.every == 0

    def save(
        self, step: int, roles: "Mapping[str, Mapping[str, Tensor]]", state: dict[str, Json], spool: Spool
    ) -> None:
        """Write a whole checkpoint, or nothing; then all but the last two go."""
        from safetensors.torch import save_file

        writing = self.folder / WRITING
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        for role, tensors in roles.items():
            save_file(dict(tensors), writing / f"{role}.safetensors")
        files = {path.name: hash_file(path) for path in writing.iterdir()}
        ends = spool.ends()
        said = Checkpoint(belongs_to=self.belongs_to, step=step, state=state, spool=ends, files=files)
        (writing / STATE).write_text(said.model_dump_json(indent=1))
        sync_tree(writing)
        target = self._at(step)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(writing, target)
        sync_tree(self.folder)
        for older in self._steps()[:-KEPT]:
            shutil.rmtree(self._at(older))

    def _find(self) -> Checkpoint | None:
        for step in reversed(self._steps()):
            found = self._read(step)
            if found is not None:
                return found
        return None

    def _read(self, step: int) -> Checkpoint | None:
        """A whole checkpoint of this very stage; anything else that lies there is not used."""
        folder = self._at(step)
        try:
            raw = json.loads((folder / STATE).read_bytes())
            if raw.get("version") != SCHEMA:
                raise ValueError(f"it has form {raw.get('version')}, and this version reads form {SCHEMA}")
            found = Checkpoint.model_validate(raw)
            if found.belongs_to != self.belongs_to:
                raise ValueError("it belongs to another piece of work")
            changed = [name for name, digest in found.files.items() if hash_file(folder / name) != digest]
            if changed:
                raise ValueError(f"{', '.join(changed)} changed after they were written")
        except (OSError, ValueError) as error:
            self.unusable.append(f"the checkpoint of step {step} is not used: {error}")
            return None
        return found

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit())

    def _at(self, step: int) -> Path:
        return self.folder / f"{step:06d}"
