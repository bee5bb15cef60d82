"""Updates of an optimizer that read nothing on the host."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

PredicateT_contra = TypeVar("PredicateT_contra", contravariant=True)


class UpdateOnDevice(Protocol[PredicateT_contra]):
    """An update that this thread runs, with branches of which some are not taken."""

    def where(self, predicate: PredicateT_contra) -> AbstractContextManager[None]:
        """Opens a branch: what it writes into tensors stays only if `predicate` is true.

        A branch within another one is taken if the predicates of both are true.

        Args:
            predicate: A plain tensor with one bool, on the device of what is written.
        """


class OpenUpdateOnDevice(Protocol[PredicateT_contra]):
    """Opens an `UpdateOnDevice`."""

    def __call__(self) -> AbstractContextManager[UpdateOnDevice[PredicateT_contra]]:
        """Opens an update, in which torch takes no factor from a tensor as a number either."""
