"""Updates of an optimizer that read nothing on the host (ADR 56).

All branches run. A branch keeps what it overwrites, and at its end `torch.where` takes the new
values or the kept ones. A product with the predicate could not: zero times `nan` is `nan`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from shardcore.adapters import torch_private
from shardcore.adapters.torch_private import Args, Kwargs, Operator


@attrs.frozen(eq=False)
class _Branch:
    """Operators whose writes stay if `predicate`, one bool, is true."""

    predicate: torch.Tensor
    # By identity, in the order of the first writes: a tensor, and a copy of its values before.
    _overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = attrs.field(
        factory=dict, init=False
    )

    def run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Copies what `operator` overwrites before it runs."""
        if torch_private.is_skippable(operator):
            return operator(*args, **kwargs, found_inf=(~self.predicate).float())
        for tensor in torch_private.written_operands(operator, args, kwargs):
            if id(tensor) not in self._overwritten:
                self._overwritten[id(tensor)] = tensor, tensor.detach().clone()
        return operator(*args, **kwargs)

    @torch.no_grad()
    def close(self) -> None:
        """Restores what was overwritten if the predicate is false, the last tensor first."""
        for tensor, before in reversed(self._overwritten.values()):
            torch.where(self.predicate, tensor, before, out=tensor)


@attrs.define(eq=False)
class _Update:
    """The branches of an update; one may be opened within another."""

    _innermost: _Branch | None = attrs.field(default=None, init=False)

    @contextmanager
    def where(self, predicate: torch.Tensor) -> Iterator[None]:
        """Opens a branch: what it writes into tensors stays only if `predicate` is true."""
        outer = self._innermost
        branch = _Branch(predicate if outer is None else outer.predicate & predicate)
        self._innermost = branch
        try:
            yield
        finally:
            self._innermost = None  # the outer branch has nothing to undo of what follows
            branch.close()
            self._innermost = outer

    def run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        if self._innermost is None:
            return operator(*args, **kwargs)
        return self._innermost.run(operator, args, kwargs)


class _FactorsInTensors(TorchFunctionMode):
    """Computes `x + alpha * y` with a factor in a tensor, which torch would read as a number.

    torch multiplies and adds at once, so the sum may differ in its last bit.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        factor = kwargs.get("alpha")
        # Of two operands `add`, `sub` and those of lists multiply the second, `rsub` the first.
        if not isinstance(factor, torch.Tensor) or len(args) != 2 or func is torch.rsub:
            return func(*args, **kwargs)
        first, second = args
        is_list = isinstance(second, list | tuple)
        product = [tensor * factor for tensor in second] if is_list else second * factor
        return func(first, product, **{**kwargs, "alpha": 1})


@contextmanager
def update_on_device() -> Iterator[_Update]:
    """Opens an update, in which torch takes no factor from a tensor as a number either."""
    update = _Update()
    with torch_private.OperatorRunner(update.run), _FactorsInTensors():
        yield update
