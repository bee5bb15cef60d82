"""The time between the steps of an epoch, and loaders of batches."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch


@attrs.define
class Clock:
    """Adds up the time of steps on a device; what is between them is waiting.

    Args:
        device: "cpu" or "cuda".
    """

    device: str
    _steps: list[tuple[Any, Any]] = attrs.field(factory=list, init=False)
    _outside: float = attrs.field(default=0.0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Takes the time of a step, on a GPU that of its kernels."""
        began = self._now()
        yield
        self._steps.append((began, self._now()))

    def outside(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `draw`, whose time on the host counts as waiting though a step calls it."""

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return draw(*given)
            finally:
                self._outside += time.perf_counter() - began

        return timed

    def share(self) -> float:
        """Returns the share of the time between the first step and the end of the last."""
        whole = self._between(self._steps[0][0], self._steps[-1][1])
        in_steps = sum(self._between(*step) for step in self._steps)
        waiting = whole - in_steps + (self._outside if self.device == "cpu" else 0.0)
        return waiting / whole

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        if self.device == "cpu":
            return last - first
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000


def loader(x: Any, y: Any, batch: int, device: str) -> Iterable[Any]:
    """Returns a `DataLoader` with two workers over arrays."""
    dataset = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    return torch.utils.data.DataLoader(
        dataset, batch, num_workers=2, pin_memory=device == "cuda", persistent_workers=True
    )


def copied_ahead(batches: Iterable[Any], device: str) -> Iterator[list[torch.Tensor]]:
    """Yields batches on a GPU, each copied while the one before it is computed; as by hand."""
    if device == "cpu":
        yield from batches
        return
    stream, ahead = torch.cuda.Stream(), None
    for batch in batches:
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in batch]
        copied = stream.record_event()
        if ahead is not None:
            yield _waited(*ahead)
        ahead = copies, copied
    if ahead is not None:
        yield _waited(*ahead)


def _waited(copies: list[torch.Tensor], copied: Any) -> list[torch.Tensor]:
    kernels = torch.cuda.current_stream()
    kernels.wait_event(copied)
    for copy in copies:
        copy.record_stream(kernels)
    return copies
