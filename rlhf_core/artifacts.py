"""The store: artifacts named by their content, and the recipes that made them.

    objects/<digest>/     files and a manifest: kind, schema, files' hashes; digest = its sha256
    recipes/<key>.json    what was asked for (stage, version, settings, inputs, seed) and what came out

Writing is a temporary folder, hashes, fsync and a rename: there are no half artifacts. Both are created once.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from rlhf_core.settings import Json, Settings

MANIFEST = "artifact.json"
SCHEMA = 1


class ArtifactError(RuntimeError):
    """The store holds something other than what its names promise."""


class ArtifactRef(Settings):
    """All that tasks and flows pass of an artifact."""

    kind: str
    """What it is: prompts, completions, policy, ..."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """sha256 of its content."""
    key: str
    """The recipe that gave it, where it was first wanted."""


class Recipe(Settings):
    """What was asked for and what came out, created once."""

    stage: str
    version: int
    key: str
    settings: dict[str, Json]
    seed: int
    inputs: dict[str, ArtifactRef]
    outputs: dict[str, ArtifactRef]
    told: dict[str, Json] = Field(default_factory=dict)
    """What is recorded and decides nothing: code fingerprint, execution, times, host, versions."""


def canonical(value: object) -> bytes:
    """The one JSON spelling of a value: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256(data: bytes) -> str:
    """The hex digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> str:
    """The hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) that depends on nothing but its parts: randomness is counted, not carried."""
    return int.from_bytes(hashlib.sha256(canonical(list(parts))).digest()[:8], "big") >> 1


def recipe_key(
    stage: str, version: int, settings: Mapping[str, Json], inputs: Mapping[str, ArtifactRef], seed: int
) -> str:
    """The name of a piece of work: equal keys ask for equal results."""
    digests = {role: ref.digest for role, ref in inputs.items()}
    return sha256(
        canonical({"stage": stage, "version": version, "settings": settings, "inputs": digests, "seed": seed})
    )


class Store:
    """Artifacts and recipes under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("objects", "recipes", "verified", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """An empty folder to write an artifact into; gone afterwards unless `commit` took it."""
        folder = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, folder: Path, kind: str, key: str) -> ArtifactRef:
        """Make the files in `folder` an artifact; who comes second with equal content adopts the first."""
        files = _hash_files(folder)
        if not files or MANIFEST in files:
            raise ArtifactError(f"{kind} to commit: it needs files, none of them called {MANIFEST}")
        manifest = canonical({"kind": kind, "schema": SCHEMA, "files": files})
        (folder / MANIFEST).write_bytes(manifest)
        sync_tree(folder)
        ref = ArtifactRef(kind=kind, digest=sha256(manifest), key=key)
        target = self._object(ref.digest)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            self.open(ref)  # never vouch for a first one that was changed since
        else:
            _sync(target.parent)
            self._stamp(ref.digest)
        return ref

    def open(self, ref: ArtifactRef) -> Path:
        """The folder of an artifact, verified: fully once per machine, then by size, time and inode."""
        folder = self._object(ref.digest)
        if not folder.is_dir():
            raise ArtifactError(
                f"{ref.kind} {ref.digest[:12]} is not in the store: its files were deleted or never arrived. "
                "Restore them, or delete the ledger records that name it."
            )
        stamp = self.root / "verified" / f"{ref.digest}.json"
        if not stamp.exists() or json.loads(stamp.read_bytes()) != _identity(folder):
            self.verify(ref)
            self._stamp(ref.digest)
        return folder

    def verify(self, ref: ArtifactRef) -> None:
        """Hash every file of an artifact; raises `ArtifactError` that names what differs."""
        damage = _damage(self._object(ref.digest), ref)
        if damage:
            raise ArtifactError(
                f"{ref.kind} {ref.digest[:12]} does not hold what its name promises ({', '.join(damage)}): "
                "it was changed after it was written. Restore it from a copy."
            )

    def recipe(self, key: str) -> Recipe | None:
        """What came out of this piece of work, if it was done and its artifacts are still here."""
        path = self.root / "recipes" / f"{key}.json"
        if not path.exists():
            return None
        recipe = Recipe.model_validate_json(path.read_bytes())
        missing = [ref for ref in recipe.outputs.values() if not self._object(ref.digest).is_dir()]
        return None if missing else recipe

    def record(self, recipe: Recipe) -> Recipe:
        """Record a finished piece of work; whoever comes second gets the first one's record."""
        path = self.root / "recipes" / f"{recipe.key}.json"
        data = recipe.model_dump_json(indent=1).encode()
        if create_once(path, data):
            return recipe
        first = self.recipe(recipe.key)
        if first is None:  # its files are gone: this one stands in
            replace(path, data)
        return first or recipe

    def _object(self, digest: str) -> Path:
        return self.root / "objects" / digest

    def _stamp(self, digest: str) -> None:
        replace(self.root / "verified" / f"{digest}.json", canonical(_identity(self._object(digest))))


def create_once(path: Path, data: bytes) -> bool:
    """Write a new file whole, or leave the one that is there and return False."""
    temporary = _written(path, data)
    try:
        os.link(temporary, path)
        _sync(path.parent)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink()


def replace(path: Path, data: bytes) -> None:
    """Write a file whole, in place of one that may be there."""
    _written(path, data).replace(path)
    _sync(path.parent)


def _written(path: Path, data: bytes) -> Path:
    """`data`, synced, in a temporary file beside `path`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)


def _hash_files(folder: Path) -> dict[str, str]:
    """The digest of every file in a folder."""
    paths = sorted(folder.rglob("*"))
    links = [str(path.relative_to(folder)) for path in paths if path.is_symlink()]
    if links:
        raise ArtifactError(f"{', '.join(links)}: what a link points to can change or go; store a copy of it")
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in paths if path.is_file()}


def _damage(folder: Path, ref: ArtifactRef) -> list[str]:
    """The files of an artifact that are not what its name, the digest of its manifest, promises."""
    found = _hash_files(folder)
    if found.pop(MANIFEST, None) != ref.digest:
        return [MANIFEST]
    manifest = json.loads((folder / MANIFEST).read_bytes())
    promised = manifest["files"]
    wrong = [name for name in sorted(found | promised) if found.get(name) != promised.get(name)]
    return wrong if manifest["kind"] == ref.kind else [MANIFEST, *wrong]


def _identity(folder: Path) -> dict[str, list[int]]:
    """Size, time and inode of every file: what an untouched artifact keeps."""
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in sorted(stats.items())}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """What was written in a folder is on the disk when this returns."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
