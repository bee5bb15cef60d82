"""Seam: the generator of `keras.random`, whose seed is state of a recorded step."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from shardcore.binding import seams
from shardcore.binding.session import Sessions
from shardcore.ports.capture import StepCapture


def generator(
    original: Callable[[Any], Any], sessions: Sessions, capture: StepCapture
) -> Callable[[Any], Any]:
    """`torch_seed_generator`: Keras' own, but in a step that is being recorded."""

    @wraps(original)
    def torch_seed_generator(seed: Any) -> Any:
        if not capture.is_recording() or seams.is_symbolic():
            return original(seed)
        first, second = seams.draw_seed(seed)
        total = first + second
        strategy = sessions.keeper(total)
        return capture.generator(total if strategy is None else strategy.whole(total))

    return torch_seed_generator
