"""A program: a function of tensors, the tensors that it keeps, and its guards."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.checks import Rollback
from shardcore.adapters.capture.constants import Pattern
from shardcore.adapters.capture.guards import Guard
from shardcore.adapters.capture.tape import Value
from shardcore.ports.capture import StartedCollective


@attrs.frozen
class RecordedProgram:
    """The port `Program`: a function, and the tensors that it keeps.

    Args:
        run: The function: takes inputs and kept tensors, gives the tensors among the outputs.
        kept: Tensors and generators that are read and written at each run.
        outputs: What the step returns, tensors as `Value`.
        pattern: What it has in common with the step with batches of another size.
        guards: The numbers that the step must read on the host before it runs.
        collectives: What it starts, in order.
        rollback: Puts back what a run has written where a check fails; None without checks.
        remark: Why it is not compiled, though that was asked for; else empty.
    """

    run: Callable[..., tuple[Any, ...]]
    kept: tuple[Any, ...]
    outputs: Any
    pattern: Pattern
    guards: tuple[Guard, ...]
    collectives: tuple[StartedCollective, ...]
    rollback: Rollback | None = None
    remark: str = ""

    def fits(self) -> bool:
        """Whether the next step reads on the host what this one was recorded with."""
        return all(guard.holds(self.kept) for guard in self.guards)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Runs it.

        Raises:
            GuardFailed: If the step reads another number on its way; nothing is done then.
        """
        rollback = nullcontext() if self.rollback is None else self.rollback.around(inputs)
        # Below autograd, as it was recorded. Outputs are copied: outside they may need gradients.
        with rollback, torch.inference_mode():
            made = self.run(*inputs, *self.kept)
        with torch.no_grad():
            results = iter([each.clone() for each in made])
        return torch_compat.tree_map(
            lambda leaf: next(results) if isinstance(leaf, Value) else leaf, self.outputs
        )
