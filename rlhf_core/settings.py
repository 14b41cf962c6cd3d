"""Settings are data: frozen, typed, unknown keys refused, the sentence under a field is its description."""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

Json = JsonValue


class Settings(BaseModel):
    """Base of everything a user can set."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    def to_json(self) -> dict[str, Json]:
        """The settings as plain JSON values, every default written out."""
        return typing.cast(dict[str, Json], self.model_dump(mode="json"))


class Execution(Settings):
    """Where and how fast: told with every result, part of no key.

    `auto` is resolved once, when a project is opened, and recorded there.
    """

    launcher: Literal["inline", "process"] = "inline"
    """`inline` runs a stage in the flow's process, `process` in a fresh one that frees all its memory."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """Where tensors live; `auto` takes cuda, else mps, else cpu."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves torch's own choice."""
    tokens_per_micro_batch: int = Field(default=2048, ge=64)
    """Token budget of one forward pass; changes memory and speed, never a gradient by more than rounding."""


def exact_div(total: int, parts: int, what: str) -> int:
    """`total / parts`, which must have no remainder."""
    quotient, remainder = divmod(total, parts)
    if remainder or quotient == 0:
        raise ValueError(
            f"{what}: {total} does not split into {parts} equal parts "
            f"({total} = {parts} * {quotient} + {remainder}): a short last part would get a larger step. "
            f"Choose a divisor of {total}."
        )
    return quotient


def merge(base: Mapping[str, Json], override: Mapping[str, Json]) -> dict[str, Json]:
    """`base` with `override` laid over it, mapping by mapping; a changed `type` replaces its whole member."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        other_member = (
            isinstance(old, dict) and isinstance(value, dict) and value.get("type", old.get("type")) != old.get("type")
        )
        if isinstance(old, dict) and isinstance(value, dict) and not other_member:
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def readable_errors(model: type[BaseModel], error: ValidationError) -> str:
    """One line per mistake: where, what was given, what would be right, and the closest known key."""
    lines = []
    for item in error.errors(include_url=False):
        location = tuple(part for part in item["loc"] if not _is_union_tag(model, part))
        where = ".".join(str(part) for part in location) or "settings"
        if item["type"] == "extra_forbidden":
            known = sorted(_known_keys(model, item["loc"][:-1]))
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known) or 'none'}"
            lines.append(f"{where}: unknown key; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | None) else ""
            lines.append(f"{where}: {message}{shown}")
    return "\n".join(lines)


def _members(annotation: object) -> Iterator[type[BaseModel]]:
    """All settings classes that an annotation can hold."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType, tuple, list):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _is_union_tag(model: type[BaseModel], part: object) -> bool:
    return isinstance(part, str) and part in _all_tags(model)


def _all_tags(model: type[BaseModel], seen: frozenset[type] = frozenset()) -> set[str]:
    """The `type` names of every union member below `model`; pydantic puts them into error locations."""
    tags: set[str] = set()
    for field in model.model_fields.values():
        for member in _members(field.annotation):
            if member not in seen:
                tag = member.model_fields.get("type")
                tags |= {str(tag.default)} if tag else set()
                tags |= _all_tags(member, seen | {model})
    return tags


def _known_keys(model: type[BaseModel], location: Sequence[int | str]) -> set[str]:
    """The keys that are allowed at `location`; a union's tag in the location picks its member."""
    here: list[type[BaseModel]] = [model]
    for part in location:
        fields = [m.model_fields[part].annotation for m in here if isinstance(part, str) and part in m.model_fields]
        if fields:
            here = [member for annotation in fields for member in _members(annotation)]
        else:
            tagged = [m for m in here if "type" in m.model_fields and m.model_fields["type"].default == part]
            here = tagged or here
    return {name for m in here for name in m.model_fields}


SettingsType = TypeVar("SettingsType", bound=Settings)


class InvalidSettings(ValueError):
    """Settings that were refused, said in a sentence a line."""


def parse_settings(model: type[SettingsType], values: Mapping[str, Json]) -> SettingsType:
    """`values` as `model`; raises `InvalidSettings` that names every mistake."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidSettings(readable_errors(model, error)) from error
