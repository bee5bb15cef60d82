"""The fields of an index: each is there, of its type, and within its bounds."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from shardcore.domain.checkpoints import bounds
from shardcore.domain.errors import CheckpointError

REMEDY = "use another checkpoint, or save this one again"


def fields_of(content: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Returns the fields of `content`, which are exactly those of `kinds`, with their types."""
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        raise CheckpointError(f"Expected the fields {', '.join(kinds)} in the index: {REMEDY}.")
    for name, kind in kinds.items():
        if type(content[name]) is not kind:
            raise CheckpointError(
                f"Expected {kind.__name__} as {name!r} in the index, got "
                f"{type(content[name]).__name__}: {REMEDY}."
            )
    return dict(content)


def numbers_of(content: object, name: str) -> tuple[int, ...]:
    """Returns the numbers in a list of variable `name`."""
    if not bounds.are_numbers(content):
        raise CheckpointError(f"Expected lists of numbers for variable {name!r} in the index.")
    return tuple(cast("list[int]", content))


def check_texts(texts: Iterable[object]) -> None:
    """Raises if one is no text, or too long."""
    if not all(type(text) is str and len(text) <= bounds.NAME for text in texts):
        raise CheckpointError(
            f"Expected texts of at most {bounds.NAME} characters in the index: {REMEDY}."
        )


def names_in(content: object) -> list[str]:
    """Returns the names in a list of the index, as far as they are texts."""
    fields = (
        [field for field in content if isinstance(field, dict)] if type(content) is list else []
    )
    return [field["name"] for field in fields if isinstance(field.get("name"), str)]
