"""Dispatch modes that see every operator, or every collective, that this thread runs."""

from abc import abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardcore.adapters.torch_private import collectives
from shardcore.adapters.torch_private.operators import Operator, is_fused
from shardcore.adapters.torch_private.trees import Args, Kwargs, tree_leaves, tree_map

# Marks a part of a step for the profiler, as torch's optimizers do; it computes nothing.
PROFILER = "profiler::"


# FakeTensor: a library infers shapes, and computes nothing.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class _OfPlainTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs the operators on plain tensors only."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method below in two functions of Python

    def __torch_dispatch__(
        self, func: Operator, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented  # sharded tensors first: their shards' operators come here
        return self._run(func, args, kwargs or {})

    @abstractmethod
    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Runs `operator`, or something in its place."""


class OperatorListener(_OfPlainTensors):  # type: ignore[no-untyped-call]
    """Sees every operator on plain tensors that this thread runs, before and after.

    It does not see operators on sharded tensors, but the operators that they run on local shards.

    torch 2.13: `TorchDispatchMode` has no public name. `CommDebugMode` of DTensor, which has one,
    counts collectives, but its module hooks fail on Keras layers, which call each other outside
    `torch.nn.Module.__call__`.

    Args:
        before: Called with the operator and its operands; returns None to skip `after`.
        after: Called with the operator, its operands, what `before` returned, and the result.
        context: Entered while an operator is seen and runs.
        values: Whether operators on tensors without values are passed over.
    """

    def __init__(
        self,
        before: Callable[[Any, Args, Kwargs], object],
        after: Callable[[Any, Args, Kwargs, Any, Any], None] | None = None,
        context: AbstractContextManager[None] | None = None,
        *,
        values: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after, self._context = before, after, context or nullcontext()
        self._values = values

    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        run = getattr(operator, "_op", operator)  # `OpOverload.__call__` is a call of Python more
        with self._context:
            if _computes_nothing(operator) or (self._values and _is_without_values(args, kwargs)):
                return run(*args, **kwargs)
            before = self._before(operator, args, kwargs)
            result = run(*args, **kwargs)
            if before is None or self._after is None:
                return result
            if not (self._values and _is_without_values((result,), {})):
                self._after(operator, args, kwargs, before, result)
            return result


@cache
def _computes_nothing(operator: Operator) -> bool:
    return collectives.is_autograd_wrapper(operator) or operator._schema.name.startswith(PROFILER)


def _is_without_values(args: Args, kwargs: Kwargs) -> bool:
    for operand in (*args, *kwargs.values()) if kwargs else args:
        if operand.__class__ in _PLAIN:  # most are tensors and numbers: no call for each
            if operand.is_meta or operand.__class__ is FakeTensor:
                return True
        elif isinstance(operand, tuple | list | dict) and any(
            isinstance(leaf, torch.Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor))
            for leaf in tree_leaves(operand)
        ):
            return True
    return False


class ResultListener(_OfPlainTensors):  # type: ignore[no-untyped-call]
    """Sees all operators on plain tensors with their results, also of those without values.

    Args:
        listen: Called with the operator, its operands `(args, kwargs)`, and its result.
    """

    def __init__(self, listen: Callable[[Operator, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen

    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        result = operator(*args, **kwargs)
        self._listen(operator, (args, kwargs), result)
        return result


def active_mode() -> str:
    """Names a mode of another library that this thread is in; empty without one.

    A mode sees operators, or what autograd saves, and may change both. `torch.device` is a mode
    too, and changes no more than the default device.
    torch 2.10 to 2.15: the stacks of modes and of hooks have no public names.
    """
    for mode in _get_current_dispatch_mode_stack():
        if not isinstance(mode, _OfPlainTensors):
            return type(mode).__name__
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if type(mode).__name__ != "DeviceContext":
            return type(mode).__name__
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "saved_tensors_hooks"
    return ""


class OperatorRunner(_OfPlainTensors):  # type: ignore[no-untyped-call]
    """Lets a function run all operators on plain tensors.

    Args:
        run: Called with the operator and its operands; returns the result.
    """

    def __init__(self, run: Callable[[Operator, Args, Kwargs], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run_by = run

    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        return self._run_by(operator, args, kwargs)


class _WithoutUpdatesAndWaits(_OfPlainTensors):  # type: ignore[no-untyped-call]
    """Skips operators that take no memory, but which torch 2.13 runs on copies without values.

    Fused updates of optimizers write into operands and return nothing. The wait for a collective
    returns its operand.
    """

    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        if collectives.is_wait(operator):
            return args[0]
        return None if is_fused(operator) else operator(*args, **kwargs)


def count_devices() -> None:
    """Makes autograd count the devices of this host, before torch pretends that it has more.

    Once a `FakeTensorMode` was entered, a torch for CUDA on a host without a GPU counts eight. The
    first backward pass after it would start a thread for each, and a process that is forked later
    could run none. After a pass, autograd counts no more.
    """
    if torch.accelerator.is_available():  # whose threads it needs
        return
    with torch.inference_mode(False), torch.enable_grad():
        operand = torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True)
        torch.autograd.backward(operand)


class WithoutValues(AbstractContextManager[None]):
    """A context in which operators give tensors with shapes, and compute nothing.

    Its tensors belong to it: open the same one again to use them, also in a forked process.
    """

    def __init__(self) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        updates_and_waits = _WithoutUpdatesAndWaits()  # type: ignore[no-untyped-call]
        self._modes = self._fake, updates_and_waits
        self._open = ExitStack()

    def __enter__(self) -> None:
        count_devices()
        for mode in self._modes:
            self._open.enter_context(mode)

    def __exit__(self, *_raised: object) -> None:
        self._open.close()

    def paused(self) -> AbstractContextManager[Any]:
        """Opens a context within this one in which operators compute on tensors with values."""
        return unset_fake_temporarily()

    def call_with_values(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls `function` with zeros for tensors without values; its results have none either."""

        def with_values(leaf: Any) -> Any:
            is_fake = isinstance(leaf, FakeTensor)
            return (
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if is_fake else leaf
            )

        def without_values(leaf: Any) -> Any:
            return self._fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        with self.paused():
            args, kwargs = tree_map(with_values, (args, kwargs))
            result = function(*args, **kwargs)
        return tree_map(without_values, result)


class CollectiveListener(OperatorListener):  # type: ignore[no-untyped-call]
    """Sees every collective of tensors that this thread starts.

    Args:
        listen: Called with each collective.
        operator_scope: Returns, for an operator on sharded tensors and its operands, the context in
            which it runs. The value of the context is called with the result.
        values: Whether collectives of tensors without values are passed over.
    """

    def __init__(
        self,
        listen: Callable[[collectives.CollectiveCall], None],
        operator_scope: Callable[[Any, Any], AbstractContextManager[Callable[[Any], None]]]
        | None = None,
        *,
        values: bool = True,
    ) -> None:
        def before(operator: Operator, args: Args, kwargs: Kwargs) -> None:
            started = collectives.collective_call(operator, args)
            if started is not None:
                listen(started)

        super().__init__(before, values=values)
        self._operator_scope = operator_scope
        self._is_in_operator = False

    def __torch_dispatch__(
        self, func: Operator, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if self._operator_scope is None or not any(hasattr(kind, "placements") for kind in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._is_in_operator:
            self._is_in_operator = False
            return NotImplemented
        with self._operator_scope(func, (args, kwargs)) as returned, self:
            self._is_in_operator = True
            result = func(*args, **(kwargs or {}))
        returned(result)
        return result
