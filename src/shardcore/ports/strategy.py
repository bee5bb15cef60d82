"""The contract of every strategy, ours and third parties': how a distributed variable is stored."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs

from shardcore.domain.layouts.layout import Layout
from shardcore.ports import types
from shardcore.ports.types import TensorT

# The version of the contract of strategies that this release has.
CONTRACT = 1


@attrs.frozen
class NewVariable:
    """A variable that is about to be created.

    Args:
        path: Its path in the model or the optimizer: "decoder/dense/kernel".
        shape: Its global shape.
        layout: The layout that the distribution gives it.
        batch_axes: The mesh axes that shard the batch, the major first.
        of_optimizer: Whether it belongs to an optimizer: a momentum, a step counter.
    """

    path: str
    shape: tuple[int, ...]
    layout: Layout
    batch_axes: tuple[str, ...]
    of_optimizer: bool


class Tensors(Protocol[TensorT]):
    """The methods that a strategy and a library of sharded tensors have in common.

    A sharded tensor has its global shape and knows its layout. A plain tensor is a full tensor,
    equal on every rank.
    """

    def from_local(self, part: TensorT, layout: Layout, shape: tuple[int, ...]) -> TensorT:
        """Joins the parts of all ranks, such as rows of a batch, into one sharded tensor.

        Args:
            part: The part of this rank, a plain tensor of the layout's local shape.
            layout: The layout of the result.
            shape: The global shape of the result.
        """

    def full_tensor(self, tensor: TensorT) -> TensorT:
        """Gathers the full tensor, plain and detached. A collective: all ranks call it."""

    def to_local(self, tensor: TensorT) -> TensorT:
        """The local shard, a plain tensor that shares the memory of `tensor`."""

    def owns(self, tensor: TensorT) -> bool:
        """Tells whether `tensor` is sharded by this strategy over its mesh; else it is plain."""

    def layout(self, tensor: TensorT) -> Layout | None:
        """The layout of `tensor`, or None if it is plain.

        Raises:
            LayoutError: If no `Layout` describes how it is sharded.
        """

    def implicit_replication(
        self, forbid_collectives: bool = False
    ) -> AbstractContextManager[None]:
        """Opens a scope of this thread, in which operators take plain and sharded tensors alike.

        Args:
            forbid_collectives: Whether a collective raises, as on a thread that set no distribution
                itself: each rank may start it in another order.
        """


class ShardedTensors(Tensors[TensorT], Protocol[TensorT]):
    """A library of sharded tensors: operators on them compute with their layouts."""

    def shard(self, value: TensorT, layout: Layout) -> TensorT:
        """Takes the shards of `value`, a full tensor on every rank. Starts no collective."""

    def mark_weight(self, tensor: TensorT) -> TensorT:
        """Marks `tensor` as the value of a variable, and returns it."""

    def redistribute(self, tensor: TensorT, layout: Layout) -> TensorT:
        """Redistributes `tensor` to `layout`. Its gradient gets the layout that `tensor` had."""

    def reduce_partial(self, tensor: TensorT) -> TensorT:
        """Reduces the partial sums of `tensor`; so are those of its gradient."""

    def copy_into(self, stored: TensorT, value: TensorT) -> None:
        """Overwrites `stored` in place and in its layout with the values of `value`."""

    def redistribute_gradients(self, stored: TensorT, layout: Layout) -> None:
        """Redistributes each gradient of `stored` to `layout`, once."""


class Strategy(Tensors[TensorT], Protocol[TensorT]):
    """The contract of a strategy: variables, batches and activations over one mesh.

    A `StrategyEntry` opens a strategy on a `World`. It serves every distribution of that mesh.

    One rank alone may call `create`, `from_local`, `to_local`, `owns`, `layout`, and `assign`
    with a plain value: they start no collective. `shardcore.testing.StrategyContract` tests the
    contract.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> class Replicated:
        ...     def storage(self, variable):
        ...         return Layout.replicated(variable.layout.mesh, len(variable.shape))
        >>> mesh = Mesh((2,), ("data",))
        >>> kernel = NewVariable("kernel", (8, 4), Layout(mesh, ("data", None)), "data", False)
        >>> Replicated().storage(kernel).spec
        (None, None)
    """

    def storage(self, variable: NewVariable) -> Layout:
        """Chooses the storage layout of a new variable, as a rule `variable.layout`.

        It is called before `create`, for every variable whose layout the distribution gives, and
        returns the same on all ranks. It may shard the variables of an optimizer further,
        as ZeRO-1 does (ADR 14).
        """

    def create(self, value: TensorT, storage: Layout, variable: NewVariable) -> TensorT:
        """Makes the value of a new variable, in its storage layout. Starts no collective.

        Args:
            value: The initial value, equal on all ranks: a plain tensor, which is freed
                afterwards, or, of a large variable, a tensor that `from_local` made in `storage`.
            storage: The storage layout.
            variable: The variable, as `storage` gets it; also for a layout that is given by hand,
                and for a buffer of a torch module.

        Returns:
            A tensor of the global shape that stores the local shard only.
        """

    def redistribute_gradients(self, stored: TensorT, storage: Layout) -> None:
        """Redistributes every gradient of the parameter `stored` to its storage layout."""

    def assign(self, stored: TensorT, value: TensorT) -> None:
        """Overwrites a variable's value in place with `value`, plain or in any layout."""

    def redistribute(self, tensor: TensorT, layout: Layout | None) -> TensorT:
        """Redistributes a layer's output to `layout`; without one, reduces its partial sums."""


@attrs.frozen
class StrategyEntry:
    """A strategy as a plug-in offers it.

    Args:
        name: The name that `shardcore.install(strategy=name)` takes.
        summary: One line for people.
        open: Opens the strategy on a `World`; imports torch only then. It raises a StrategyError
            that names the strategy and the mesh, for a mesh that it does not serve. Its
            keyword-only parameters are the options that `shardcore.install()` takes. An option
            that is annotated with a `Literal` takes those values only.
        why_unavailable: Returns None where the strategy can be used, else the reason and a remedy.
        preference: `strategy="auto"` takes the available entry with the highest; None is never
            taken by "auto".
        serves_one_device: Whether it also serves a model for which no distribution is set.
        contract: The version of the contract of strategies that it is written for.
        package: The package that offers it, for messages; shardcore sets it.

    Raises:
        PluginError: If a field is of another type.

    Example:
        >>> entry = StrategyEntry("mine", "An example.", open=lambda world: None)
        >>> entry.why_unavailable() is None, entry.preference is None
        (True, True)
    """

    name: str
    summary: str
    open: Callable[..., Strategy[Any]]
    why_unavailable: Callable[[], str | None] = lambda: None
    preference: int | None = None
    serves_one_device: bool = False
    contract: int = 1
    package: str = ""

    def __attrs_post_init__(self) -> None:
        types.check(
            self,
            name=types.NAME,
            summary=types.TEXT,
            open=types.FUNCTION,
            why_unavailable=types.FUNCTION,
            preference=types.INT_OR_NONE,
            serves_one_device=types.BOOL,
            contract=types.INT,
        )
