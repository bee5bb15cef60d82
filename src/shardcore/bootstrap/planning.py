"""Runs a policy: finds it, checks its options, and checks its choices."""

import inspect
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardcore import bootstrap
from shardcore.bootstrap import plugins
from shardcore.domain.errors import PolicyError, ShardcoreError, describe_error
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.rules import PlannedRules, complete, rules
from shardcore.ports.policy import Choice, LayerFacts, PolicyEntry


def plan(policy: str, model: LayerFacts, mesh: Mesh, options: Mapping[str, object]) -> PlannedRules:
    """Runs a policy on a model: for the rules, and the axes of the batch.

    Raises:
        PolicyError: If there is no such policy, it does not take the options, or what it gives
            does not fit the model.
    """
    entry = bootstrap.load_plugins().policies.get(policy, "auto")
    parameters = list(inspect.signature(entry.plan).parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        plugins.POLICIES.check_options(
            policy, options, [parameter.name for parameter in parameters[2:]]
        )
    _check_types(entry, options)
    try:
        choices = complete(_choices(entry, model, mesh, options), model, mesh)
    except PolicyError as error:
        if entry.package == "shardcore":
            raise
        raise PolicyError(
            f"Policy {policy!r} of package {entry.package!r}: {error}", name=policy
        ) from error
    outputs = [layer.output_path for layer in model.layers() if layer.output_path]
    return PlannedRules(rules(choices, outputs), mesh.axis_names[: entry.batch_ndim])


def _check_types(entry: PolicyEntry, options: Mapping[str, object]) -> None:
    hints = get_type_hints(entry.plan)
    for name, value in options.items():
        kinds = _kinds(hints.get(name))
        if all(isinstance(kind, type) for kind in kinds) and not isinstance(value, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise PolicyError(
                f"Option {name!r} of policy {entry.name!r}: expected {expected}, got {value!r}.",
                name=name,
                got=repr(value),
            )


def _kinds(hint: object) -> tuple[Any, ...]:
    """Lists the classes of an annotation: of each member of a union, or of a generic alias.

    Example:
        >>> _kinds(int | None) == (int, type(None)), _kinds(dict[str, int])
        (True, (<class 'dict'>,))
    """
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for member in get_args(hint) for kind in _kinds(member))
    return (get_origin(hint) or hint,)


def _choices(
    entry: PolicyEntry, model: LayerFacts, mesh: Mesh, options: Mapping[str, object]
) -> Mapping[str, Choice]:
    try:
        choices = entry.plan(model, mesh, **options)
    except (ShardcoreError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: it is not the program's
        raise PolicyError(f"it failed with {describe_error(error)}") from error
    if not isinstance(choices, Mapping):
        raise PolicyError(
            f"it gave {choices!r}, expected a mapping of paths to Choices", name=choices
        )
    return choices
