"""The interface of all contenders: first losses, epochs, memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from benchmarks import memory


class Training(ABC):
    """A model with its optimizer and data, on one rank. All ranks are asked the same together."""

    @abstractmethod
    def losses(self, steps: int) -> list[float]:
        """The loss of each of the next steps, all of them on one batch."""

    @abstractmethod
    def epoch(self, steps: int) -> float:
        """Seconds per step over an epoch, from its beginning to its loss being read."""

    @abstractmethod
    def kept(self) -> Iterable[Any]:
        """The local shards of variables and optimizer state, as torch tensors."""

    @abstractmethod
    def share(self) -> int:
        """The bytes of them that theory asks for."""

    def memory(self) -> dict[str, int]:
        """Bytes: stored, the share of theory, and the peaks of a step and of this process."""
        stored = sum(memory.storage_bytes(tensor) for tensor in self.kept())
        return {"stored": stored, "share": self.share(), **memory.peak(lambda: self.epoch(1))}


class Fitting(Training):
    """A training whose epochs draw batches from data, so that steps may wait for them."""

    @abstractmethod
    def waiting(self, steps: int, source: str) -> float:
        """The share of an epoch, from "arrays" or by "two workers", between the steps."""
