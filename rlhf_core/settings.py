"""Settings are data: frozen, typed, unknown keys refused, the sentence under a field is its description."""

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

Json = JsonValue
Weights = Literal["lora", "full"]
"""How all roles of a trunk are held: as adapters on its one base, or each with all weights as its own."""


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
    checkpoint_steps: int = Field(default=5, ge=0)
    """Steps of a policy update between two checkpoints, from which a killed one goes on; 0 writes none."""
    tracking_seconds: float = Field(default=60.0, ge=0)
    """How long promotion waits for MLflow to know its round, before the round ends as `TrackingBehind`."""


def exact_div(total: int, parts: int, what: str) -> int:
    """`total / parts`, which must have no remainder."""
    quotient, remainder = divmod(total, parts) if parts > 0 else (0, total)
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
        if isinstance(old, dict) and isinstance(value, dict):
            same_member = value.get("type", old.get("type")) == old.get("type")
            merged[key] = merge(old, value) if same_member else value
        else:
            merged[key] = value
    return merged


def readable_errors(model: type[BaseModel], error: ValidationError) -> str:
    """One line per mistake: where, what was given, what would be right, and the closest known key."""
    lines = []
    for item in error.errors(include_url=False):
        path, inside = _walk(model, item["loc"])
        where = ".".join(path) or "settings"
        if item["type"] == "extra_forbidden":
            known = sorted({name for member in inside for name in member.model_fields})
            near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known) or 'none'}"
            lines.append(f"{where}: unknown key; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | None) else ""
            lines.append(f"{where}: {message}{shown}")
    return "\n".join(lines)


def _walk(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of a location as a user wrote them, and the settings classes that could hold the last one.

    Pydantic puts the `type` of a union's member between the field and the member's own keys; a user does not.
    """
    path: list[str] = []
    here, tag_is_next = [model], False
    for part in location:
        tagged = [member for member in here if tag_is_next and part in _tags(member)]
        fields = [member.model_fields[str(part)] for member in here if part in member.model_fields]
        if tagged:
            here, tag_is_next = tagged, False
            continue
        path.append(str(part))
        if fields:
            here = [member for field in fields for member in _members(field.annotation)]
            tag_is_next = len(here) > 1
    return path, here


def _tags(member: type[BaseModel]) -> tuple[str, ...]:
    """The `type` that tells a member of a union from the others."""
    tag = member.model_fields.get("type")
    return typing.get_args(tag.annotation) if tag else ()


def _members(annotation: object) -> Iterator[type[BaseModel]]:
    """All settings classes that an annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _members(part)


SettingsType = TypeVar("SettingsType", bound=Settings)


class InvalidSettings(ValueError):
    """Settings that were refused, said in a sentence a line."""


def parse_settings(model: type[SettingsType], values: Mapping[str, Json]) -> SettingsType:
    """`values` as `model`; raises `InvalidSettings` that names every mistake."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidSettings(readable_errors(model, error)) from error
