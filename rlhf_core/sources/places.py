"""Where rows are: the package's own prompts, files and folders, a dataset of the Hugging Face hub."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core import prompts_data
from rlhf_core.settings import Settings
from rlhf_core.sources.files import Row, read_path
from rlhf_core.sources.mistakes import InvalidSource


class TableSource(Settings):
    """Rows with columns, and how they are to be understood."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Our field to the column that holds it, for instance {prompt: instruction}; `a.0.b` reaches inside a
    column. Without it the columns' own names decide what a row is."""
    plain_text: Literal["opening", "message"] = "opening"
    """What a prompt that is plain text is: an `opening` that the model continues, or a user's `message` that
    it answers through its chat template."""
    max_bad_share: float | None = Field(default=None, ge=0, le=1)
    """The share of rows that may be unusable; more of them refuse the source. By default no row of prompts
    may, and 2 % of preferences and demonstrations."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The source as its user calls it."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows in the source's order, read one by one."""


class FileSource(TableSource):
    """A file of yours, or a folder of them: JSON lines, a JSON array, CSV or Parquet, by its suffix."""

    type: Literal["file"] = "file"
    """A file or a folder of yours."""
    path: str = Field(min_length=1)
    """The file (.jsonl, .json, .csv, .parquet, each also with .gz), or a folder that holds such."""

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    def rows(self) -> Iterator[Row]:
        """The rows of the file, or of all files in the folder in the order of their names."""
        return read_path(Path(self.path))


class HubSource(TableSource):
    """A dataset of the Hugging Face hub, streamed through `datasets`; code in its repository is never run."""

    type: Literal["hub"] = "hub"
    """A dataset of the Hugging Face hub."""
    id: str = Field(min_length=1)
    """`owner/name`, or a folder that `datasets` can load."""
    config: str | None = None
    """Which of its configurations."""
    data_dir: str | None = None
    """A folder inside its repository."""
    split: str = "train"
    """Which of its splits."""
    revision: str | None = None
    """The branch, tag or commit; a commit is the only one that stays what it is."""

    @property
    def name(self) -> str:
        """The id with the split."""
        return f"{self.id}[{self.split}]"

    def rows(self) -> Iterator[Row]:
        """The rows of the split as they come over the network."""
        # One import of `datasets` takes longer than all that reads files.
        from datasets import load_dataset  # type: ignore[import-untyped]
        from datasets.exceptions import DatasetsError  # type: ignore[import-untyped]

        try:
            table = load_dataset(
                self.id,
                self.config,
                data_dir=self.data_dir,
                split=self.split,
                revision=self.revision,
                streaming=True,
            )
            for number, values in enumerate(table, start=1):
                yield Row(self.name, number, values)
        except (OSError, ValueError, DatasetsError) as error:
            raise InvalidSource(f"{self.name}: `datasets` cannot read it: {error}") from error


class PackagedPrompts(Settings):
    """Prompts that come with the package."""

    type: Literal["packaged"] = "packaged"
    """Prompts that come with the package."""
    name: Literal["openings", "chats"] = "openings"
    """`openings` are plain texts that a base model continues, `chats` are conversations to answer."""

    def table(self) -> FileSource:
        """The packaged file."""
        return FileSource(path=str(prompts_data.path(f"{self.name}.jsonl")))


RowSource = Annotated[FileSource | HubSource, Field(discriminator="type")]
PromptSource = Annotated[PackagedPrompts | FileSource | HubSource, Field(discriminator="type")]
