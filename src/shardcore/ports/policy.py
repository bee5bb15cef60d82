"""The contract of policies: the facts of a model that they get, and the layouts that they choose.

The facts are the layers of the model, their variables, and their connections.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from shardcore.domain.layouts.spec import DimSpec
from shardcore.domain.layouts.variable_size import VariableSize
from shardcore.ports import types


@attrs.frozen
class VariableFacts(VariableSize):
    """One variable.

    Args:
        path: Its path, such as "block_0/dense/kernel".
        shape: Its global shape.
        itemsize: The bytes of one element.
        trainable: Whether it is trained.
    """

    trainable: bool = True


@attrs.frozen
class LayerFacts:
    """One layer, or one operation of a functional model, with everything below it.

    Args:
        name: Its name, which no sibling has.
        kinds: The names of its class and of the classes that it derives from, its own first.
        config: Facts of its configuration, if it has them: `activation` (a name), `axis`
            (counted from the end), `data_format`, `groups`, `equation`, `num_heads`.
        variables: Its own variables, without the states of seed generators. A shared variable is in
            the first layer only.
        children: The layers that it holds, in the order of definition, or the operations of a
            functional model, inputs first.
        feeds: Pairs of names: the first child's output is an input of the second. None if
            Keras does not know: only functional and sequential models have a graph.
        outputs: The children whose outputs are outputs of this layer, if `feeds` is known.
        path: Its path, such as "block_0/dense", the name of an input; empty for an operation, whose
            output no rule names.
        input_shape: The shape of its input when it was built, the batch first, with None for
            open sizes. None if it has several inputs, or Keras does not know.
        runs: The names of equal children in a row, each fed by the one before, if `feeds` is known.

    Example:
        >>> kernel = VariableFacts("model/hidden/kernel", (4, 8))
        >>> hidden = LayerFacts("hidden", ("Dense",), {"activation": "relu"}, (kernel,))
        >>> model = LayerFacts("model", ("Sequential",), children=(hidden,), feeds=())
        >>> [layer.name for layer in model.layers()], model.all_variables() == (kernel,)
        (['model', 'hidden'], True)
    """

    name: str
    kinds: tuple[str, ...]
    config: Mapping[str, Any] = attrs.field(factory=dict)
    variables: tuple[VariableFacts, ...] = ()
    children: tuple["LayerFacts", ...] = ()
    feeds: tuple[tuple[str, str], ...] | None = None
    outputs: tuple[str, ...] = ()
    path: str = ""
    input_shape: tuple[int | None, ...] | None = None
    runs: tuple[tuple[str, ...], ...] = ()

    @property
    def output_path(self) -> str:
        """The path to which a rule for its output applies; empty if no rule can."""
        return self.path and f"{self.path}/output"

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.kinds[0]

    def is_a(self, *kinds: str) -> bool:
        """Tells whether its class is one of `kinds`, or derives from one."""
        return not set(kinds).isdisjoint(self.kinds)

    def variable(self, name: str) -> VariableFacts | None:
        """Looks up its own variable of that name, None without one."""
        return next((variable for variable in self.variables if variable.name == name), None)

    def child(self, name: str) -> "LayerFacts | None":
        """Looks up the child of that name, None without one."""
        return next((child for child in self.children if child.name == name), None)

    def layers(self) -> Iterator["LayerFacts"]:
        """Yields itself and all layers below it, parents first."""
        yield self
        for child in self.children:
            yield from child.layers()

    def all_variables(self) -> tuple[VariableFacts, ...]:
        """The variables of all its layers, parents first."""
        return tuple(variable for layer in self.layers() for variable in layer.variables)


# The version of the contract of policies that this release has.
CONTRACT = 1

Spec = tuple[DimSpec, ...]


@attrs.frozen
class Choice:
    """The layout of one variable, or of a layer's output, with the reason.

    Args:
        spec: Per tensor dim None, an axis name, or a tuple of axis names, the major first.
        reason: The reason, in a few words for people.
    """

    spec: Spec
    reason: str


# A pure function of a model's facts and a mesh, and of its options by keyword, that gives the
# choices by the paths of variables and of outputs (`LayerFacts.output_path`). Variables that it
# leaves out are replicated; outputs stay as they are computed.
Policy = Callable[..., Mapping[str, Choice]]


@attrs.frozen
class PolicyEntry:
    """A policy as a plug-in offers it.

    Args:
        name: The name that `shardcore.plan(policy=name)` takes.
        summary: One line for people.
        plan: The policy: `plan(model, mesh, **options)`, a `LayerFacts` and a `Mesh` of any shape
            in, a `Choice` for each variable's path out, and for the path of each layer's output
            whose layout it changes. Variables that it leaves out are replicated. Its parameters
            after the first two are its options.
        batch_ndim: The number of mesh axes, from the first, that shard the batch.
        contract: The version of the contract of policies that it is written for.
        package: The package that offers it, for messages; shardcore sets it.

    Raises:
        PluginError: If a field has a value that it may not have.

    Example:
        >>> entry = PolicyEntry("mine", "Everything replicated.", plan=lambda model, mesh: {})
        >>> entry.name
        'mine'
    """

    name: str
    summary: str
    plan: Policy
    batch_ndim: int = 1
    contract: int = 1
    package: str = ""

    def __attrs_post_init__(self) -> None:
        types.check(
            self,
            name=types.NAME,
            summary=types.TEXT,
            plan=types.FUNCTION,
            batch_ndim=types.COUNT,
            contract=types.INT,
        )
