"""Where rows come from and what they mean, and the Parquet files that row sets are kept in."""

from rlhf_core.sources.files import Row
from rlhf_core.sources.mistakes import InvalidSource, RowMistake
from rlhf_core.sources.places import FileSource, HubSource, PackagedPrompts, PromptSource, RowSource
from rlhf_core.sources.reading import (
    Reading,
    demonstrations,
    kind_of,
    preferences,
    prompts,
    read_prompts,
)
from rlhf_core.sources.rowsets import count_rows, read_column, read_rows, write_rows

__all__ = [
    "FileSource",
    "HubSource",
    "InvalidSource",
    "PackagedPrompts",
    "PromptSource",
    "Reading",
    "Row",
    "RowMistake",
    "RowSource",
    "count_rows",
    "demonstrations",
    "kind_of",
    "preferences",
    "prompts",
    "read_column",
    "read_prompts",
    "read_rows",
    "write_rows",
]
