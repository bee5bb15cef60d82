"""Patches of Keras: declared at the function that replaces a name (ADR 2), made, and undone.

`@replaces` notes a patch on the function, and `declared_in` reads them from a module.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, wraps
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import attrs

from shardcore.binding.keras_private.lines import LINE, here
from shardcore.binding.types import Original

OLDEST = (3, 13)  # the first line of Keras that shardcore supports
# The attribute of a function that has its patches.
DECLARED = "_shardcore_patches"

Line = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., Any])


@attrs.frozen
class Patch:
    """A name of Keras that is replaced.

    Args:
        name: The module that defines it, a colon, and the name in it, dotted for a class member, as
            in Keras 3.15.
        reason: Why it is replaced.
        since: The first line of Keras in which it is replaced.
        until: The last one; None if it still is.
        everywhere: Whether modules that have imported the name get the new value too.
        is_value: Whether the function makes the new value; else it is called instead of the name.
    """

    name: str
    reason: str
    since: Line = OLDEST
    until: Line | None = None
    everywhere: bool = False
    is_value: bool = False

    @property
    def key(self) -> str:
        """The class and its member, or the last module and the name in it."""
        module, _, name = self.name.partition(":")
        return name if name[0].isupper() else f"{module.rpartition('.')[2]}.{name}"

    @property
    def last(self) -> str:
        """The name in the module or class."""
        return self.name.replace(":", ".").rpartition(".")[2]

    @property
    def place(self) -> str:
        """The name in the Keras that is installed."""
        return here(self.name)

    @property
    def is_needed(self) -> bool:
        """Whether the installed line of Keras needs it."""
        return self.since <= LINE and (self.until is None or self.until >= LINE)


def replaces(
    *names: str,
    reason: str,
    since: Line = OLDEST,
    until: Line | None = None,
    everywhere: bool = False,
) -> Callable[[Function], Function]:
    """Declares that a function is called instead of functions of Keras.

    It gets the function that it replaces as `original`, followed by the arguments of the call. Its
    parameters before `original` are what it needs of the installation, by name:

    - `sessions` and `capture`: those of the installation;
    - `session`: the current session; without one, Keras' own function runs;
    - `name`: the name that was called, without its module and class;
    - `self`: the object of this class that the installation has.

    Args:
        *names: The names in Keras 3.15, each as `Patch.name`.
        reason: Why they are replaced: what Keras does there.
        since: The first line of Keras in which they are replaced.
        until: The last one; None if they still are.
        everywhere: Whether modules that have imported the names get the function too.

    Example:
        >>> @replaces("keras.src.utils.io_utils:print_msg", reason="One rank prints.")
        ... def print_once(sessions, original, *args):
        ...     if is_first_rank(sessions):
        ...         original(*args)
        >>> [patch.key for patch in patches_of(print_once)]
        ['io_utils.print_msg']
    """
    return _declare([Patch(name, reason, since, until, everywhere) for name in names])


def replaces_value(
    *names: str,
    reason: str,
    since: Line = OLDEST,
    until: Line | None = None,
    everywhere: bool = False,
) -> Callable[[Function], Function]:
    """Declares that a function returns, from the `original` values of names, the new ones.

    It is called once for each name, as shardcore is installed. The rest is as for `replaces`.
    """
    return _declare(
        [Patch(name, reason, since, until, everywhere, is_value=True) for name in names]
    )


def _declare(patches: Iterable[Patch]) -> Callable[[Function], Function]:
    def declare(function: Function) -> Function:
        vars(function)[DECLARED] = (*patches, *patches_of(function))
        return function

    return declare


def patches_of(function: Callable[..., Any]) -> tuple[Patch, ...]:
    """Reads what `replaces` has noted; nothing of another function."""
    patches: tuple[Patch, ...] = getattr(function, DECLARED, ())
    return patches


@attrs.frozen
class Replacement:
    """A name of Keras, and the function of shardcore that replaces it.

    Args:
        patch: The name.
        function: The function.
        owner: The class whose method it is; None of a function of a module.
    """

    patch: Patch
    function: FunctionType
    owner: type | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the parameters before `original`; an underscore marks one as unused."""
        code = self.function.__code__
        parameters = (name.lstrip("_") for name in code.co_varnames[: code.co_argcount])
        return tuple(takewhile(lambda name: name != "original", parameters))


def declared_in(module: ModuleType) -> Iterator[Replacement]:
    """Yields what the functions and classes of a module declare."""
    yield from _declared(vars(module), module)
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            yield from _declared(vars(kind), module, kind)


def _declared(
    namespace: Any, module: ModuleType, owner: type | None = None
) -> Iterator[Replacement]:
    for function in namespace.values():
        # What a module imports is declared in another one.
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            for patch in patches_of(function):
                yield Replacement(patch, function, owner)


def wrap_calls(
    replacement: Callable[..., object],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Builds a decorator: a Keras function calls `replacement`, with itself first."""

    def decorate(original: Original) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return decorate


def replace(patch: Patch, function: Callable[..., Any], undo: ExitStack) -> None:
    """Lets `function`, whose first parameter is the original, replace a name until `undo`."""
    holder, name = _holder(patch)
    original = getattr(holder, name)
    value = function(original) if patch.is_value else wrap_calls(function)(original)
    for owner in _importers(original) if patch.everywhere else [holder]:
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:  # a class that inherits it
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)


@contextmanager
def replaced(*functions: Callable[..., Any]) -> Iterator[None]:
    """Opens a context in which functions replace the names that they declare."""
    with ExitStack() as undo:
        for function in functions:
            for patch in patches_of(function):
                if patch.is_needed:
                    replace(patch, function, undo)
        yield


@attrs.frozen
class _LayerCalls:
    """Calls `call(original, layer, *args, **kwargs)` for each call of a layer."""

    call: Callable[..., Any]

    @replaces("keras.src.layers.layer:Layer.__call__", reason="Follows the calls of layers.")
    def layer_call(self, original: Original, *args: object, **kwargs: object) -> Any:
        return self.call(original, *args, **kwargs)


def wrap_layer_calls(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Calls `call(original, layer, *args, **kwargs)` for each call of a layer in the context."""
    return replaced(_LayerCalls(call).layer_call)


def missing(patches: Iterable[Patch]) -> list[str]:
    """Lists the names of `patches` that this Keras does not have."""
    return [patch.place for patch in patches if not _is_there(patch)]


def _is_there(patch: Patch) -> bool:
    try:
        holder, name = _holder(patch)
    except (ImportError, AttributeError):
        return False
    return hasattr(holder, name)


def _holder(patch: Patch) -> tuple[Any, str]:
    """Resolves the module or class that has the name, and the name in it."""
    module, _, path = patch.place.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def _importers(original: Original) -> list[ModuleType]:
    modules = _modules_of_keras(len(sys.modules))
    return [module for module in modules if vars(module).get(original.__name__) is original]


@lru_cache(maxsize=1)
def _modules_of_keras(_loaded: int) -> list[ModuleType]:
    names = [name for name in list(sys.modules) if name.startswith("keras")]  # of thousands
    return [sys.modules[name] for name in names if name.partition(".")[0] == "keras"]
