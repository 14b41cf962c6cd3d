import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.sources import FileSource


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., FileSource]:
    """Writes lines into a file and gives its settings; what is neither text nor bytes becomes JSON."""

    def write(*lines: object, **settings: object) -> FileSource:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(_bytes(line) + b"\n" for line in lines))
        return FileSource.model_validate({"path": str(path), **settings})

    return write


def _bytes(line: object) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


@pytest.fixture
def shared(shared_data: Path) -> Callable[..., FileSource]:
    """The settings of a real file or folder; skips where the public data sets are not at hand."""

    def source(path: str, **settings: object) -> FileSource:
        return FileSource.model_validate({"path": str(shared_data / path), **settings})

    return source
