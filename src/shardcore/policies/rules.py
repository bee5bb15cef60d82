r"""Conversion of choices to the rules of a layout map: equal blocks share one rule.

A number that ends a name (`block_0/...`) becomes `\d+` if all variables of that form have one
layout and different numbers. A path matches only one such rule, since it has one form.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import attrs

from shardcore.domain.errors import LayoutError, PolicyError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_keys import METACHARACTERS
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import entry_axes
from shardcore.policies.specs import replicated
from shardcore.ports.policy import Choice, LayerFacts, Spec, VariableFacts

_NUMBER = re.compile(r"(?<=_)\d+(?=/|$)")


@attrs.frozen
class Rule:
    """One rule of a plan."""

    key: str  # the key in the layout map
    spec: Spec  # its value
    reason: str  # why


@attrs.frozen
class PlannedRules:
    """The choices of a policy for a model and a mesh."""

    rules: tuple[Rule, ...]
    batch_axes: tuple[str, ...]  # the axes that shard the batch, the major first

    @property
    def by_path(self) -> PathRules[Spec]:
        """The specs of its rules, to be looked up by path."""
        return PathRules({rule.key: rule.spec for rule in self.rules})


def idle_axes(mesh: Mesh, batch_axes: Iterable[str], specs: Iterable[Spec]) -> tuple[str, ...]:
    """Lists the axes of a mesh over which neither the batch nor anything of a model is sharded.

    Example:
        >>> idle_axes(Mesh((2, 4), ("data", "model")), ("data",), [(None, None)])
        ('model',)
    """
    used = {axis for spec in specs for dim in spec for axis in entry_axes(dim)}
    used.update(batch_axes)
    return tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1 and axis not in used)


def complete(choices: Mapping[str, Choice], model: LayerFacts, mesh: Mesh) -> dict[str, Choice]:
    """Checks the choices, and adds one for each variable that a policy has left out.

    A path that several variables of different shapes share gets none: no rule would fit them all.

    Raises:
        PolicyError: If a choice is for no variable and no output, or does not fit it or the mesh.
    """
    variables = model.all_variables()
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    known = {variable.path: variable for variable in variables}
    for variable in variables:
        shapes[variable.path].add(variable.shape)
    outputs = {layer.output_path for layer in model.layers()} - {""}
    for path, choice in choices.items():
        if path not in known and path not in outputs:
            raise PolicyError(
                f"it chose {choice} for {path!r}, which is no variable of the model, and no "
                "layer's path with '/output' after it",
                name=path,
            )
        if len(shapes.get(path, ())) < 2:
            _check(path, known.get(path), choice, mesh)
    left_out = "replicated: left out by the policy"
    return {
        path: choices.get(path, Choice(replicated(variable), left_out))
        for path, variable in known.items()
        if len(shapes[path]) == 1
    } | {path: choice for path, choice in choices.items() if path not in known}


def _check(path: str, variable: VariableFacts | None, choice: Choice, mesh: Mesh) -> None:
    """Checks a choice: its dims for a variable, and its axes also for an output."""
    if not isinstance(choice, Choice):
        raise PolicyError(f"it gave {choice!r} for {path!r}, expected a Choice", name=choice)
    try:
        layout = Layout(mesh, choice.spec)
        if variable is not None:
            layout.fitting(variable.shape, "It")
    except LayoutError as error:
        of_shape = "" if variable is None else f" of shape {variable.shape}"
        raise PolicyError(
            f"its choice for {path!r}{of_shape} does not fit: {error}", name=path
        ) from error


def rules(choices: Mapping[str, Choice], others: Iterable[str] = ()) -> tuple[Rule, ...]:
    r"""Writes one rule for each form of path whose choices agree, else one for each path.

    `others` are paths that no rule may match.

    Example:
        >>> up, norm = Choice((None, "model"), "columns"), Choice((None,), "norm")
        >>> chosen = {"block_0/up/kernel": up, "block_1/up/kernel": up, "norm/beta": norm}
        >>> for rule in rules(chosen):
        ...     print(rule.key, rule.spec)
        block_\d+/up/kernel (None, 'model')
        norm/beta (None,)
    """
    merged_rules: list[Rule] = []
    specs = {path: choice.spec for path, choice in choices.items()}
    for key, paths in shared_keys(specs, others):
        reasons = dict.fromkeys(choices[path].reason for path in paths)
        merged_rules.append(Rule(key, choices[paths[0]].spec, "; ".join(reasons)))
    return tuple(merged_rules)


def shared_keys(
    values: Mapping[str, object], others: Iterable[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    r"""Yields keys that match paths, each with its paths; those of a form with one value share one.

    A form that `others` have too, paths without a value, is not shared.

    Example:
        >>> list(shared_keys({"block_0": 1, "block_1": 1, "head": 2}))
        [('block_\\d+', ['block_0', 'block_1']), ('head', ['head'])]
        >>> list(shared_keys({"up_1": 1, "up_3": 1}, others=["up_2"]))
        [('up_1', ['up_1']), ('up_3', ['up_3'])]
    """
    forms: dict[str, list[str]] = defaultdict(list)
    for path in values:
        forms[_NUMBER.sub("#", path)].append(path)
    taken = {_NUMBER.sub("#", path) for path in others if path not in values}
    for form, paths in forms.items():
        if (
            form not in taken
            and len(paths) > 1
            and all(values[path] == values[paths[0]] for path in paths)
        ):
            yield _pattern(paths), paths
        else:
            for path in paths:
                yield path if METACHARACTERS.isdisjoint(path) else _escaped(path), [path]


def _pattern(paths: list[str]) -> str:
    """Builds the regular expression for paths of one form, in which different numbers are open."""
    texts = _NUMBER.split(paths[0])
    numbers = zip(*map(_NUMBER.findall, paths), strict=True)
    common = [numbers_at[0] if len(set(numbers_at)) == 1 else r"\d+" for numbers_at in numbers]
    return _escaped(texts[0]) + "".join(
        number + _escaped(text) for number, text in zip(common, texts[1:], strict=True)
    )


def _escaped(text: str) -> str:
    """Escapes as `re.escape` does, but only where needed, so that rules stay readable."""
    return re.sub(r"[\\^$*+?{}\[\]()|.]", r"\\\g<0>", text)
