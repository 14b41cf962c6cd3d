"""The Parquet files that row sets are kept in: written by `datasets`, read by pyarrow.

What `datasets` writes carries its features for whoever loads it; pyarrow reads without a cache on disk.
"""

from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TypeVar, Union, get_args, get_origin

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import BaseModel, TypeAdapter, ValidationError

from rlhf_core.settings import Settings
from rlhf_core.sources.mistakes import InvalidSource

# The order decides: a bool is an int.
SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}

RowType = TypeVar("RowType", bound=Settings)


def write_rows(rows: Sequence[Settings], path: Path) -> None:
    """Write rows of one model as Parquet: its fields are the columns, equal rows are equal bytes."""
    models = {type(row) for row in rows}
    if len(models) != 1:
        raise ValueError(
            f"{path.name}: rows of {sorted(model.__name__ for model in models) or 'nothing'}: "
            "the columns are those of one model, so there must be a row, and no other model's."
        )
    from datasets import Dataset, disable_progress_bars  # type: ignore[import-untyped]

    disable_progress_bars()
    table = pa.Table.from_pylist([row.to_json() for row in rows], schema=_schema(models.pop()))
    Dataset(table).to_parquet(path)


def count_rows(path: Path) -> int:
    """The number of rows in a Parquet file, from its footer alone."""
    return int(pq.read_metadata(path).num_rows)


def read_rows(path: Path, model: type[RowType]) -> list[RowType]:
    """The rows of a Parquet file, validated into `model`."""
    rows = pq.ParquetFile(path).read().to_pylist()
    try:
        return TypeAdapter(list[model]).validate_python(rows)  # type: ignore[valid-type]
    except ValidationError as error:
        raise InvalidSource(f"{path}: holds no rows of {model.__name__}: {error}") from error


def _schema(model: type[BaseModel]) -> pa.Schema:
    """The columns of a model, from its annotations alone: no value decides a type."""
    return pa.schema([(name, _arrow_type(field.annotation)) for name, field in model.model_fields.items()])


def _arrow_type(annotation: object) -> pa.DataType:
    """How Parquet keeps a field; every type can be null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return _arrow_type(next(argument for argument in arguments if argument is not NoneType))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return pa.list_(_arrow_type(arguments[0]))
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return pa.struct(list(_schema(annotation)))
        for python, arrow in SCALARS.items():
            if issubclass(annotation, python):
                return arrow
    raise TypeError(f"no Parquet column for a field of type {annotation}: rows hold texts, numbers and lists")
