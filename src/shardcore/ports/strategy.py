"""How a distributed variable lives: the contract of every strategy, ours and third parties'."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs

from shardcore.domain.layout import Layout


@attrs.frozen
class NewVariable:
    """A variable that is about to be created, as its strategy gets it.

    Args:
        path: Its path in the model or the optimizer: "decoder/dense/kernel".
        shape: Its global shape.
        layout: The layout that the distribution gives it.
        batch_axis: The mesh axis that splits the batch.
        of_optimizer: Whether an optimizer keeps it: a momentum, a step counter.
    """

    path: str
    shape: tuple[int, ...]
    layout: Layout
    batch_axis: str
    of_optimizer: bool


class Tensors(Protocol):
    """What a strategy, and a library of sharded tensors that it may build on, do alike.

    Values are tensors over one mesh that know their layout; a plain tensor is whole and equal on
    every rank.
    """

    def join(self, part: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """The tensor of which this rank brings `part`, a batch for instance.

        Args:
            part: This rank's part, a plain tensor of the local shape.
            layout: The layout of the tensor.
            shape: Its global shape.
        """

    def whole(self, tensor: Any) -> Any:
        """The whole value as a plain tensor, on every rank. All ranks call it together."""

    def local(self, tensor: Any) -> Any:
        """What this rank stores of `tensor`, as a plain tensor that shares its memory."""

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is of the strategy's own kind, over its mesh; else it is plain."""

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of `tensor`, or None if it is plain.

        Raises:
            LayoutError: If no layout says how it is laid out.
        """

    def scope(self, visiting: bool = False) -> AbstractContextManager[None]:
        """The scope, on this thread, in which plain tensors and the strategy's own mix.

        Args:
            visiting: Whether the thread only computes with what it finds, and set no distribution:
                ranks do not agree on the order of its collectives, so one raises.
        """


class ShardedTensors(Tensors, Protocol):
    """What a strategy needs from a library of sharded tensors, which compute with their layouts."""

    def shard(self, value: Any, layout: Layout) -> Any:
        """`value`, plain and whole on every rank, cut to `layout` without communication."""

    def keep(self, tensor: Any) -> Any:
        """`tensor`, known from now on as what a variable keeps between uses."""

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        """`tensor` in `layout`. The gradient comes back in the layout that `tensor` had."""

    def settle(self, tensor: Any) -> Any:
        """`tensor` with its pending reductions done; those of its gradient are done as well."""

    def copy_into(self, stored: Any, value: Any) -> None:
        """Overwrite the values of `stored`, in place and in its layout, with those of `value`."""

    def on_gradient(self, stored: Any, layout: Layout) -> None:
        """Bring every gradient that `stored` will get into `layout`, once."""


class Strategy(Tensors, Protocol):
    """The life of variables, batches and activations over one mesh.

    A strategy is opened on a `World` by its `StrategyEntry` and serves all the distributions of
    that mesh. Values are tensors of the strategy's own library; a plain tensor is whole and
    equal on every rank.

    One rank alone may call `create`, `join`, `local`, `owns`, `layout`, and `assign` with a plain
    value: they start no collective. `shardcore.testing.StrategyContract` tests what is promised.
    """

    def storage(self, variable: NewVariable) -> Layout:
        """The layout that a new variable keeps between uses: as a rule `variable.layout`.

        It is asked for every variable that takes its layout from the distribution, before
        `create`, and must answer alike on all ranks. A model's variables should stay as the
        layout map says; what else is kept may be split further.
        """

    def create(self, value: Any, storage: Layout) -> Any:
        """What a variable holds: this rank's part of `value`, which is plain and whole.

        Args:
            value: The initial value, equal on all ranks. It is not kept.
            storage: The layout that the variable keeps between uses.

        Returns:
            A tensor of the global shape that stores only the local part.
        """

    def track(self, stored: Any, storage: Layout) -> None:
        """Bring every gradient of the parameter `stored` into its storage layout."""

    def assign(self, stored: Any, value: Any) -> None:
        """Overwrite the variable in place with `value`, plain or in any layout."""

    def activation(self, tensor: Any, layout: Layout | None) -> Any:
        """An activation at a layer's edge: in `layout`, or with its pending sums done."""


@attrs.frozen
class StrategyEntry:
    """A strategy as a plug-in offers it.

    Args:
        name: What `shardcore.install(strategy=name)` takes.
        summary: One line for people.
        open: Makes the strategy for one mesh. Imports what it needs only when it is called. A
            mesh that is not served is a StrategyError that names the strategy and the mesh. Its
            keyword-only parameters are options that `shardcore.install()` takes; of one that is
            annotated with a `Literal`, it takes those values only.
        why_unavailable: None where the strategy can be used, else the reason with its remedy.
        preference: `strategy="auto"` takes the available entry with the highest; None is never
            taken by "auto".
        serves_one_device: Whether it also serves a model for which no distribution is set.
        package: Who offers it, for messages; shardcore fills it in when it finds the entry.

    Example:
        >>> entry = StrategyEntry("mine", "An example.", open=lambda world: None)
        >>> entry.why_unavailable() is None, entry.preference is None
        (True, True)
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z][a-z0-9_-]*"))
    summary: str
    open: Callable[..., Strategy]
    why_unavailable: Callable[[], str | None] = lambda: None
    preference: int | None = None
    serves_one_device: bool = False
    package: str = ""
