"""Rows out of files, one at a time: JSON lines, a JSON array, CSV, Parquet.

Knows nothing of what a row means. A row that cannot be read is given with its mistake and the next one is
read; a file whose structure is broken, so that no next row can be found, is refused as a whole.
"""

import csv
import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.sources.mistakes import InvalidSource

BATCH_ROWS = 256
READ_CHARACTERS = 1 << 16
# A quote that is never closed would otherwise take the rest of the file for one field.
MAX_CSV_FIELD = 1 << 24
# Space, and the mark that some editors put before UTF-8.
SKIPPED = b" \t\r\n\xef\xbb\xbf"
SPACE = re.compile(r"[ \t\n\r]*")
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, csv.Error, pa.ArrowException)

Values = dict[str, object]


@dataclass(frozen=True)
class Row:
    """A row as its file has it."""

    file: str
    """The file, as seen from the source."""
    number: int
    """The line in JSON lines; elsewhere the row, counted from 1, a header not counted."""
    values: Values | None
    """The columns, or None where the row cannot be read."""
    mistake: str = ""
    """Why it cannot be read."""


Numbered = Iterator[tuple[int, Values | str]]


def read_path(path: Path) -> Iterator[Row]:
    """The rows of a file, or of all files in a folder that can hold rows, in the order of their names."""
    if not path.is_dir():
        yield from _read_file(path, path.name)
        return
    members = [member for member in sorted(path.rglob("*")) if _format(member) and _visible(member, path)]
    if not members:
        raise InvalidSource(f"{path}: a folder without a file that can hold rows ({', '.join(FORMATS)})")
    for member in members:
        yield from _read_file(member, member.relative_to(path).as_posix())


def _visible(member: Path, folder: Path) -> bool:
    return member.is_file() and not any(part.startswith(".") for part in member.relative_to(folder).parts)


def _format(path: Path) -> Callable[[IO[bytes]], Numbered] | None:
    return FORMATS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def _read_file(path: Path, name: str) -> Iterator[Row]:
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            read = _format(path)
            if read is None:
                raise InvalidSource(f"{path}: of no known kind: the name must end in {', '.join(FORMATS)}")
            for number, found in read(cast(IO[bytes], file)):
                if isinstance(found, str):
                    yield Row(name, number, None, found)
                else:
                    yield Row(name, number, found)
    except BROKEN as error:
        raise InvalidSource(f"{path}: damaged, no row can be found after this: {error}") from error
    except OSError as error:
        raise InvalidSource(f"{path}: {error.strerror or error}") from error


def _json(file: IO[bytes]) -> Numbered:
    """The elements of an array, or lines where the file does not begin with one."""
    start = file.read(1)
    while start and start in SKIPPED:
        start = file.read(1)
    file.seek(0)
    return _json_array(file) if start == b"[" else _json_lines(file)


def _json_lines(file: IO[bytes]) -> Numbered:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _parse(line.strip())


def _parse(line: bytes) -> Values | str:
    try:
        return _values(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return f"not UTF-8 from byte {error.start + 1} on"
    except json.JSONDecodeError as error:
        return f"not JSON from character {error.pos + 1} on: {error.msg}"
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        return f"not JSON: {error}"


def _values(row: object) -> Values | str:
    """The columns of a JSON row; a bare string is a text."""
    if isinstance(row, str):
        return {"text": row}
    return row if isinstance(row, dict) else f"not a JSON object: {reprlib.repr(row)}"


def _json_array(file: IO[bytes]) -> Numbered:
    number = 0
    try:
        with TextIOWrapper(file, encoding="utf-8-sig") as text:
            for number, value in enumerate(_elements(text), start=1):
                yield number, _values(value)
    except (ValueError, RecursionError) as error:
        raise InvalidSource(f"{file.name}: damaged after element {number} of its array: {error}") from error


def _elements(text: IO[str]) -> Iterator[object]:
    """The elements of an array, read a piece at a time: the standard decoder wants all of a file at once."""
    decoder, buffer, at, before = json.JSONDecoder(), "", 0, "["
    while True:
        piece = text.read(max(READ_CHARACTERS, len(buffer) - at))
        buffer, at = buffer[at:] + piece, 0
        while True:
            start = _after_space(buffer, at)
            if buffer.startswith("]", start) and before == ",":
                return
            if not buffer.startswith(before, start):
                break
            start = _after_space(buffer, start + 1)
            if buffer.startswith("]", start) and before == "[":
                return
            try:
                value, end = decoder.raw_decode(buffer, start)
            except json.JSONDecodeError:
                break
            if end == len(buffer) and piece:
                break  # a number may go on in the next piece
            yield value
            at, before = end, ","
        if not piece:
            raise ValueError(f"no `{before}` with an element behind it, and no `]`")


def _after_space(text: str, at: int) -> int:
    return cast(re.Match[str], SPACE.match(text, at)).end()


def _csv(file: IO[bytes]) -> Numbered:
    """The rows under a header; an empty field is none, for CSV knows no other."""
    csv.field_size_limit(MAX_CSV_FIELD)
    with TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(text, strict=True)
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise csv.Error(f"the header names a column twice: {', '.join(header)}")
        for number, row in enumerate((row for row in rows if row), start=1):
            yield number, _under(header, row)


def _under(header: list[str], row: list[str]) -> Values | str:
    if len(row) != len(header):
        return f"{len(row)} fields under a header of {len(header)}"
    if any("\udc80" <= character <= "\udcff" for field in row for character in field):
        return "not UTF-8"
    return {name: field or None for name, field in zip(header, row, strict=True)}


def _parquet(file: IO[bytes]) -> Numbered:
    number = 0
    for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS):
        for found in _batch(batch):
            number += 1
            yield number, found


def _batch(batch: pa.RecordBatch) -> list[Values | str]:
    try:
        return cast(list[Values | str], batch.to_pylist())
    except UnicodeDecodeError:
        return [_single(batch.slice(at, 1)) for at in range(batch.num_rows)]


def _single(batch: pa.RecordBatch) -> Values | str:
    try:
        return cast(Values, batch.to_pylist()[0])
    except UnicodeDecodeError:
        return "not UTF-8"


FORMATS: dict[str, Callable[[IO[bytes]], Numbered]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
