"""What is in place while at least one scope asks for it."""

from abc import ABC, abstractmethod


class WhileUsed(ABC):
    """A change that the first scope puts in place, and the last one takes back."""

    _users = 0

    def enter(self) -> None:
        """Put the change in place, unless another scope has."""
        self._users += 1
        if self._users == 1:
            self._put()

    def leave(self) -> None:
        """Take the change back when the last scope leaves."""
        self._users -= 1
        if not self._users:
            self._take_back()

    @abstractmethod
    def _put(self) -> None: ...

    @abstractmethod
    def _take_back(self) -> None: ...
