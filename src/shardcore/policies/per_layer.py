"""Policy `per_layer`: for each layer one of four policies.

The mesh is that of `hybrid_sharded`. Under each of the four, what goes from layer to layer has its
rows sharded over `("replica", "shard")`, and nothing else: the choice for one layer moves nothing
at another one.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.policies import tensor_parallel
from shardcore.policies.data_parallel import plan_fully_sharded, plan_hybrid_sharded
from shardcore.policies.specs import SMALL, all_replicated
from shardcore.ports.policy import Choice, LayerFacts

NAME = "per_layer"
# The number of axes, from the first, that shard the batch.
BATCH_NDIM = 2
DATA_PARALLEL = "data_parallel"

_Choices = dict[str, Choice]


def _data_parallel(model: LayerFacts, mesh: Mesh, _small: int) -> _Choices:
    summed = " and ".join(map(repr, mesh.axis_names[:BATCH_NDIM]))
    return all_replicated(model.all_variables(), f"gradients are summed over {summed}")


_WITHOUT_MODEL: dict[str, Callable[[LayerFacts, Mesh, int], _Choices]] = {
    DATA_PARALLEL: _data_parallel,
    "fully_sharded": lambda model, mesh, small: plan_fully_sharded(
        model, mesh, axis=mesh.axis_names[1], small=small
    ),
}
_WITH_MODEL = _WITHOUT_MODEL | {
    "tensor_parallel": lambda model, mesh, small: tensor_parallel.plan(model, mesh, small=small),
    "hybrid_sharded": lambda model, mesh, small: plan_hybrid_sharded(model, mesh, small=small),
}


def policies_on(mesh: Mesh) -> tuple[str, ...]:
    """The policies that a layer may have on a mesh.

    Example:
        >>> policies_on(Mesh((1, 4), ("replica", "shard")))
        ('data_parallel', 'fully_sharded')
    """
    return tuple(_WITHOUT_MODEL if mesh.ndim == BATCH_NDIM else _WITH_MODEL)


def plan(
    model: LayerFacts,
    mesh: Mesh,
    *,
    layers: Mapping[str, str] = MappingProxyType({}),
    otherwise: str = DATA_PARALLEL,
    small: int = SMALL,
) -> dict[str, Choice]:
    """Lays out each layer by the policy that is given for it.

    Args:
        model: The model.
        mesh: The mesh: `(replica, shard)`, or `(replica, shard, model)`.
        layers: The policy by the path of a layer, or by a pattern of paths: for that layer, and
            for the layers in it that have no other one.
        otherwise: The policy of the other layers.
        small: As in these policies.

    Raises:
        PolicyError: If the mesh has other axes, a policy is not one of the four, or no layer has
            such a path.
    """
    if mesh.ndim not in (BATCH_NDIM, BATCH_NDIM + 1):
        raise PolicyError(
            f"Policy {NAME!r} takes a mesh (replica, shard) or (replica, shard, model), "
            f"got {mesh}.",
            name=NAME,
            got=str(mesh),
        )
    allowed = policies_on(mesh)
    for key, name in {**layers, "otherwise=": otherwise}.items():
        if name not in allowed:
            raise PolicyError(
                f"Policy {NAME!r}, {key}: on mesh {mesh} a layer has one of {', '.join(allowed)}; "
                f"got {name!r}.",
                name=NAME,
                got=repr(name),
            )
    rules = PathRules(layers)
    paths = [layer.path for layer in model.layers() if layer.path]
    if unused := rules.report(paths).unused_rules:
        raise PolicyError(
            f"Policy {NAME!r}: no layer has the path {unused[0]!r}; there are "
            f"{', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}.",
            name=NAME,
        )
    by_name = {
        name: _WITH_MODEL[name](model, mesh, small) for name in {*layers.values(), otherwise}
    }
    return {
        path: Choice(by_name[name][path].spec, f"{name}: {by_name[name][path].reason}")
        for path, name in _by_variable(model, rules, otherwise)
    }


def _by_variable(layer: LayerFacts, rules: PathRules[str], name: str) -> Iterator[tuple[str, str]]:
    """Yields the policy of each variable of `layer`, which has the policy `name` if no other."""
    match = rules.match(layer.path) if layer.path else None
    name = name if match is None else match.value
    yield from ((variable.path, name) for variable in layer.variables)
    for child in layer.children:
        yield from _by_variable(child, rules, name)
