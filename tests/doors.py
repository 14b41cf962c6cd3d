"""Who is behind a door."""

from typing import get_args


def members(door: object) -> tuple[type, ...]:
    """The settings behind a door: the members of its annotated union, or its only one."""
    inner = get_args(door)[0]
    return get_args(inner) or (inner,)
