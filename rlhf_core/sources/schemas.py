"""What a schema is: fields that tell what a row means, and what is made of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlhf_core.sources.fields import Fields

T_co = TypeVar("T_co", covariant=True)


def _always(row: Fields) -> bool:
    return True


@dataclass(frozen=True)
class Schema(Generic[T_co]):
    """A set of fields that tells what a row is, and what is made of it."""

    name: str
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    """Fields that a row may have besides."""
    read: Callable[[Fields], Iterable[T_co]]
    fits: Callable[[Fields], bool] = _always
    """What must hold of a row's values, where the fields alone do not decide."""

    def recognises(self, row: Fields) -> bool:
        """Whether a row has the fields, every mapped field is one of them, and its values fit."""
        known = all(row.get(field) is not None for field in self.needs)
        return known and set(row.columns) <= {*self.needs, *self.uses} and self.fits(row)


def any_of(*fields: str) -> Callable[[Fields], bool]:
    """That a row has one of the fields."""
    return lambda row: any(row.get(field) is not None for field in fields)


def all_are(kind: type, *fields: str) -> Callable[[Fields], bool]:
    """That the values of the fields are of one kind."""
    return lambda row: all(isinstance(row.get(field), kind) for field in fields)
