"""The contract of policies, which choose the layout of each variable and output of a model."""

from collections.abc import Callable, Mapping

import attrs

from shardcore.domain.layouts.spec import DimSpec
from shardcore.ports import entries

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
        entries.check(
            self,
            name=entries.NAME,
            summary=entries.TEXT,
            plan=entries.FUNCTION,
            batch_ndim=entries.COUNT,
            contract=entries.INT,
        )
