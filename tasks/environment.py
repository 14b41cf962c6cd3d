"""What the code runs on: versions, commit, device; nothing that names a person, a machine or a place."""

import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from rlhf_core.settings import Settings


class Environment(Settings):
    """What a round was played with."""

    python: str
    platform: str
    """Operating system and processor family."""
    device: str
    """cpu, cuda or mps."""
    device_name: str
    git_commit: str
    """The commit of the code; empty where it was installed and not checked out."""
    git_dirty: bool
    """Tracked files differ from the commit."""
    packages: list[str]
    """Every installed distribution as `name==version`, sorted."""

    def tags(self) -> dict[str, str]:
        """What is looked for in MLflow."""
        return {
            "rlhf.python": self.python,
            "rlhf.device": self.device,
            "rlhf.device_name": self.device_name,
            "rlhf.git_commit": self.git_commit,
            "rlhf.git_dirty": str(self.git_dirty).lower() if self.git_commit else "",
        }


def environment(device: str) -> Environment:
    """What this process runs on."""
    commit, dirty = git_state(Path(__file__))
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=device,
        device_name=device_name(device),
        git_commit=commit,
        git_dirty=dirty,
        packages=sorted({f"{d.name.lower()}=={d.version}" for d in distributions() if d.name}),
    )


def device_name(device: str) -> str:
    """The device as its maker calls it."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return _processor() or platform.machine()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def git_state(file: Path) -> tuple[str, bool]:
    """The commit a file was checked out from, and whether tracked files differ from it.

    ("", False) where git is not installed, or where the file merely lies inside some repository.
    """
    try:
        tracked = _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "HEAD") if tracked else ""
        changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no") if commit else ""
    except FileNotFoundError:
        return "", False
    return commit, bool(changes)


def _git(folder: Path, *arguments: str) -> str:
    asked = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else ""
