"""A graph as one call from Python, of torch's interpreter."""

import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Tape
from shardcore.adapters.torch_compat import flight_recorder
from shardcore.adapters.torch_compat.interpreter import NotInterpretedError, interpreted

logger = logging.getLogger("shardcore.capture")


def in_one_call(module: fx.GraphModule, tape: Tape) -> Callable[..., Any]:
    """Runs `module`, the graph of `tape`; it is more calls where something is for Python to do."""
    try:
        if _sends_from_cpu(tape) and flight_recorder.is_on():
            raise NotInterpretedError(f"torch keeps traces of collectives ({flight_recorder.SIZE})")
        return interpreted(module)
    except NotInterpretedError as refusal:
        logger.debug("Each operator is called from Python: %s", refusal)
        return module.forward


def _sends_from_cpu(tape: Tape) -> bool:
    return any(
        tape.form(value).device.type == "cpu"
        for call in tape.calls
        if torch_compat.is_collective(call.operator)
        for value in call.operands
    )
