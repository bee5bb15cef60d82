"""Seam: the numbers that the optimizer Nadam reads of its own state."""

from typing import Any

import attrs

from shardcore.ports.capture import StepCapture


@attrs.frozen
class NumbersOfNadam:
    """What stands for `core` in its module: in a recording a number stays in its tensor.

    Args:
        core: The module of Keras.
        capture: Knows whether a step is being recorded.
    """

    core: Any
    capture: StepCapture

    def convert_to_numpy(self, number: Any) -> Any:
        """`number`, to be divided by: as a tensor it gives the same to the last bit."""
        return number if self.capture.is_recording() else self.core.convert_to_numpy(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)
