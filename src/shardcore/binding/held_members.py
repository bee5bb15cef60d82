"""What containers have in them, compared without a line of Python for each member."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import attrs


@attrs.frozen
class HeldMembers:
    """What dicts, lists and sets had in them, end to end: thousands are looked at in each step.

    Args:
        containers: The dicts, lists and sets.
        live: The same; of a dict, the view of its values.
        sizes: How long they were.
        members: What was in them.
    """

    containers: list[Any]
    live: list[Any]
    sizes: list[int]
    members: list[Any]

    @classmethod
    def of(cls, containers: Iterable[Any]) -> "HeldMembers":
        """What is in them now."""
        found = list(containers)
        live = [each.values() if isinstance(each, dict) else each for each in found]
        return cls(found, live, list(map(len, live)), list(chain.from_iterable(live)))

    def are_in_place(self) -> bool:
        """Whether nothing came, went, or gave its place to something else.

        Example:
            >>> options = {"rate": 0.5}
            >>> held = HeldMembers.of([options, []])
            >>> held.are_in_place()
            True
            >>> options["rate"] = 0.1
            >>> held.are_in_place()
            False
        """
        now = chain.from_iterable(self.live)
        return list(map(len, self.live)) == self.sizes and all(map(is_, now, self.members))

    def changed(self, same: Callable[[Any, Any], bool]) -> Iterator[Any]:
        """The containers in which something is not the `same` as it was."""
        members = iter(self.members)
        for container, live, size in zip(self.containers, self.live, self.sizes, strict=True):
            before = [next(members) for _ in range(size)]
            if len(live) != size or not all(map(same, live, before)):
                yield container
