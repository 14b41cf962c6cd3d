"""The folder that holds all a project leaves: whose format it is, and whether it can be written to."""

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core import __version__
from rlhf_core.artifacts import create_once

FORMAT = 1
"""Raised when what an older version reads would be misread."""
MIN_FREE_BYTES = 256 * 2**20
"""Less cannot hold a round's adapters and row sets; a trunk takes as much again as its base model."""
DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk's quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
}


class InvalidHome(ValueError):
    """A folder that cannot be a home, or cannot be one for this version."""


class DiskFailed(RuntimeError):
    """The disk under a home refused a write half way; what was committed before is whole."""


def check_format(home: Path) -> None:
    """Refuse a home that a newer version wrote; reads only."""
    written = home / "home.json"
    if not written.exists():
        return
    try:
        said = json.loads(written.read_bytes())
        format_, version = int(said["format"]), str(said["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidHome(
            f"{written} does not say which version wrote this home ({error}): something else wrote there. "
            "Name another folder with --home."
        ) from error
    if format_ > FORMAT:
        raise InvalidHome(
            f"{home} was written by rlhf-rounds {version} in format {format_}, and this is {__version__}, "
            f"which knows formats up to {FORMAT}: it would misread the project. Install {version} or newer."
        )


def check_writable(home: Path) -> None:
    """Refuse a home that nothing, or too little, can be written to; leaves nothing behind."""
    place = home
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise InvalidHome(
            f"home {home}: {place} is a file, and a home is a folder. Name another with --home."
        )
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InvalidHome(_sentence(home, error)) from error
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        raise InvalidHome(
            f"home {home}: {free / 2**20:.0f} MiB are free on its disk, and a round needs "
            f"{MIN_FREE_BYTES / 2**20:.0f} MiB at least: it would stop half way. Free some, or name another "
            "folder with --home."
        )


def open_home(home: Path) -> None:
    """Make the folder, and say in it which version made it."""
    home.mkdir(parents=True, exist_ok=True)
    create_once(home / "home.json", json.dumps({"format": FORMAT, "version": __version__}).encode())


@contextmanager
def saying_what_the_disk_did(home: Path) -> Iterator[None]:
    """A disk that fills up or goes away half way ends in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise DiskFailed(
            f"{_sentence(home, error)} All that was finished is kept: the same command goes on from there."
        ) from error


def _sentence(home: Path, error: OSError) -> str:
    why = DISK_ERRORS.get(error.errno or 0, str(error))
    where = f" ({error.filename})" if error.filename else ""
    return f"home {home} cannot be written to{where}: {why}. Free it, or name another folder with --home."
