"""Functions of torch that no operator shows: reads on the host, and the state of generators."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.ports.capture import Observer

# Named operands that are numbers: torch reads them from tensors.
NUMBERS = ("alpha", "value")

# Why `x.data = value` is in no program, and what to write instead.
REPLACES_MEMORY = ("x.data = value replaces the memory of a tensor", "write x.data.copy_(value)")

_OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)

# The most members of a list that are looked at; a longer one may hold anything.
_MOST_MEMBERS = 100

_SEED_BITS = 0xFFFFFFFF

# Ask for the form of a tensor, not for its values: Keras calls these hundreds of times in a step.
_FORM: frozenset[Any] = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "grad", "is_leaf", "is_meta", "layout", "ndim", "shape")
        ),
        *(torch.Tensor.dim, torch.Tensor.is_contiguous, torch.Tensor.numel),
        *(torch.Tensor.size, torch.Tensor.stride, torch.Tensor.is_floating_point),
    }
)
_READS = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
}


@attrs.define
class Unobserved:
    """Disables an observer while code runs that is not the user's: most calls are torch's and ours.

    Args:
        observer: Enabled outside.
    """

    observer: Observer
    _depth: int = attrs.field(default=0, init=False)

    def begin(self) -> None:
        """Disables the observer; calls may nest."""
        if not self._depth:
            self.observer.disable()
        self._depth += 1

    def end(self) -> None:
        """Enables the observer at the end of the outermost part."""
        self._depth -= 1
        if not self._depth:
            self.observer.enable()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()


class FunctionListener(TorchFunctionMode):
    """Observes functions of torch that this thread calls, which no operator shows.

    Args:
        read: Called with a tensor whose values are read on the host, and how.
        refuse: Called with what no program can do, and what to write instead.
        numbers: Entered while torch reads a number from a tensor that is a named operand.
        as_one_call: Replaces a function that reads values only to check them; called with it and
            its operands.
        unobserved: Entered while a function runs that calls none of the user's.
    """

    def __init__(
        self,
        read: Callable[[Any, str], None],
        refuse: Callable[[str, str], None],
        numbers: Callable[[], AbstractContextManager[None]],
        as_one_call: Callable[[Any, Args, Kwargs], Any],
        unobserved: Unobserved,
    ) -> None:
        super().__init__()
        self._read, self._refuse = read, refuse
        self._numbers, self._as_one_call = numbers, as_one_call
        self._unobserved = unobserved

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if func in _FORM:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in _READS:
            self._read(args[0], f"Tensor.{func.__name__}()")
        if _sets_data(func):
            self._refuse(*REPLACES_MEMORY)
        if func is torch.nn.functional.one_hot and _is_checked(*args, **kwargs):
            return self._as_one_call(func, args, kwargs)
        if kwargs and any(isinstance(kwargs.get(name), torch.Tensor) for name in NUMBERS):
            with self._numbers():
                return func(*args, **kwargs)
        if _may_call_back(func, types, args, kwargs):
            return func(*args, **kwargs)
        self._unobserved.begin()  # thousands in a step: a `with` takes twice the time
        try:
            return func(*args, **kwargs)
        finally:
            self._unobserved.end()


def _sets_data(func: Any) -> bool:
    """Finds the setter of `torch.Tensor.data`, which `install()` replaces."""
    is_setter = getattr(func, "__name__", None) == "__set__"
    return is_setter and func == torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _may_call_back(func: Any, types: Any, args: Args, kwargs: Kwargs) -> bool:
    """Finds functions of torch that may call those of the user: hooks or operands."""
    operands = (*args, *kwargs.values())
    if func is torch.Tensor.backward or any(map(callable, operands)):
        return True
    if isinstance(func, _OPERATORS) and not str(func).startswith("aten."):
        return True  # `torch.library` may implement it by the user's functions
    return not (all(map(_is_of_c, types)) and all(map(_runs_no_python, operands)))


def _runs_no_python(operand: Any) -> bool:
    """Tells whether torch can read an operand without a method of the user's: `__array__`."""
    kind: Any = type(operand)  # a class is hashable, which mypy does not know
    if kind is not list and kind is not tuple:
        return _is_of_c(kind)
    return len(operand) <= _MOST_MEMBERS and all(map(_runs_no_python, operand))


@cache
def _is_of_c(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("builtins", "numpy", "torch", "shardcore")


def _is_checked(tensor: Any, num_classes: int = -1) -> bool:
    """Tells whether `one_hot` reads values on the host only to check the range of classes."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and num_classes > 0


def seeded_generator(seed: torch.Tensor) -> torch.Generator:
    """Makes a generator with the value of `seed`, as `keras.random` does on torch."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed) & _SEED_BITS)
    return generator


@cache
def seeded_by_tensor(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `draw` to take its seed in a tensor: one function for each, to compare traces."""

    @wraps(draw)
    def draw_with(seed: torch.Tensor, **operands: Any) -> Any:
        return draw(**operands, seed=int(seed) & _SEED_BITS)

    return draw_with


def _among_draws(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tags `function` as an operator that draws: a program keeps it in order with the draws."""
    vars(function)["tags"] = (torch.Tag.nondeterministic_seeded,)
    return function


@_among_draws
def generator_states() -> list[torch.Tensor]:
    """Reads torch's generators: that of the CPU, and of the GPU if one is in use."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if is_used else [])]


@_among_draws
def set_generator_states(states: Sequence[torch.Tensor]) -> None:
    """Sets torch's generators to `states`, of `generator_states`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


RecomputationContexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recomputation_contexts(as_one_call: Callable[..., Any]) -> RecomputationContexts:
    """Makes the contexts of a forward pass that begins now, and of its recomputations.

    `torch.utils.checkpoint` saves and restores the random state where no recorder sees it, so these
    contexts record that. `as_one_call` is of the recorder.
    """
    return nullcontext(), _Recomputation(as_one_call, as_one_call(generator_states, (), {}))


@attrs.define(eq=False)
class _Recomputation(AbstractContextManager[None]):
    """Sets torch's generators to the states `begin`; at the end, to those before."""

    as_one_call: Callable[..., Any]
    begin: Any
    _before: Any = attrs.field(default=None, init=False)

    def __enter__(self) -> None:
        self._before = self.as_one_call(generator_states, (), {})
        self.as_one_call(set_generator_states, (self.begin,), {})

    def __exit__(self, *error: object) -> None:
        self.as_one_call(set_generator_states, (self._before,), {})
