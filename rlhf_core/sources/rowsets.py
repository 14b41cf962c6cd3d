"""The Parquet files that row sets are kept in, written and read in groups: no set need fit into memory.

They carry the features of `datasets` for whoever loads them with it; pyarrow reads without a cache on disk.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
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
ROWS_PER_GROUP = 10_000

RowType = TypeVar("RowType", bound=Settings)


def write_rows(rows: Iterable[Settings], path: Path) -> None:
    """Write rows of one model as Parquet: its fields are the columns, equal rows are equal bytes."""
    coming = iter(rows)
    first = next(coming, None)
    if first is None:
        raise ValueError(f"{path.name}: rows of nothing: the columns are those of the rows' model.")
    from datasets import Features  # type: ignore[import-untyped]

    schema = Features.from_arrow_schema(_schema(type(first))).arrow_schema
    coming = chain([first], coming)
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(islice(coming, ROWS_PER_GROUP)):
            models = {type(first), *map(type, group)}
            if len(models) > 1:
                raise ValueError(
                    f"{path.name}: rows of {sorted(model.__name__ for model in models)}: "
                    "the columns are those of one model."
                )
            writer.write_table(pa.Table.from_pylist([row.to_json() for row in group], schema=schema))


def count_rows(path: Path) -> int:
    """The number of rows in a Parquet file, from its footer alone."""
    return int(pq.read_metadata(path).num_rows)


def read_column(path: Path, name: str) -> list[str]:
    """One column of a Parquet file, of texts."""
    return [str(value) for value in pq.ParquetFile(path).read([name]).column(0).to_pylist()]


def read_rows(path: Path, model: type[RowType], places: Sequence[int] | None = None) -> list[RowType]:
    """The rows of a Parquet file, validated into `model`: all, or those at `places` in that order."""
    file = pq.ParquetFile(path)
    if places is None:
        return _validated(file.read().to_pylist(), model, path)
    taken: dict[int, object] = {}
    wanted, start = sorted(set(places)), 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        inside = [place for place in wanted if start <= place < end]
        if inside:
            table = file.read_row_group(group).take([place - start for place in inside])
            taken.update(zip(inside, table.to_pylist(), strict=True))
        start = end
    return _validated([taken[place] for place in places], model, path)


def _validated(rows: list[object], model: type[RowType], path: Path) -> list[RowType]:
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
