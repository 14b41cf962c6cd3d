"""The prompts that come with the package, written for this project.

`openings.jsonl`: plain openings that a base model continues; neutral in themselves, so that all feeling comes
from the policy. `chats.jsonl`: conversations to answer, some with a system message or several turns.
"""

from importlib.resources import files
from pathlib import Path


def path(name: str) -> Path:
    """The packaged prompt file called `name`, for instance `openings.jsonl`."""
    folder = Path(str(files(__name__)))
    known = sorted(file.name for file in folder.glob("*.jsonl"))
    if name not in known:
        raise ValueError(f"no packaged prompts are called {name!r}; there are {', '.join(known)}.")
    return folder / name
