"""`parallelize_torch_module`: lays a torch module out by the rules of a layout map."""

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from keras.distribution import LayoutMap

from shardcore.binding import keras_private
from shardcore.binding.engine import torch_state
from shardcore.binding.layouts import rules_of
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.training.calls import lay_out
from shardcore.domain.errors import ArgumentProblem, LayoutError, MeshError, RuleError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.ports.types import MeshLike, RulesLike


def parallelize(module: Any, mesh: MeshLike, rules: RulesLike, sessions: Sessions) -> Any:
    """Lays `module` out in place; parameters without a rule are replicated. A collective."""
    session = sessions.required()
    _check_mesh(mesh, session)
    _check_module(module, session)
    by_path = rules_of(rules) if isinstance(rules, LayoutMap) else PathRules(rules)
    layouts, outputs = _layouts(module, by_path, session)
    if session.mesh.size == 1:
        return module
    torch_state.agree(module, session)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    stored = {
        id(tensor): torch_state.store_tensor(tensor, name, layouts.get(id(tensor)), session)
        for name, tensor in tensors
    }
    torch_state.replace_tensors(module, stored)
    for submodule in module.modules():
        ModuleEdge(session, sessions.edges, outputs.get(submodule)).attach(submodule)
    return module


def _layouts(
    module: torch.nn.Module, rules: PathRules[Any], session: Session
) -> tuple[dict[int, Layout], dict[torch.nn.Module, Layout]]:
    """Returns the layouts that rules give: of parameters, by `id`, and of outputs, by module."""
    names: dict[int, list[str]] = defaultdict(list)  # a tied parameter has several
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    layouts: dict[int, Layout] = {}
    for parameter in module.parameters():
        key = _rule_of(names[id(parameter)], rules)
        if key is not None:
            layout = _layout(key, rules[key], session)
            what = f"Rule {key!r}: the parameter"
            layouts[id(parameter)] = layout.fitting(tuple(parameter.shape), what)
    outputs: dict[torch.nn.Module, Layout] = {}
    paths = [name for aliases in names.values() for name in aliases]
    for name, submodule in module.named_modules():
        path = f"{name}.output" if name else "output"  # as of a Keras layer's
        if match := rules.match(path):
            outputs[submodule] = _layout(match.key, match.value, session)
            paths.append(path)
    _refuse_unused(rules, paths, module)
    return layouts, outputs


def _rule_of(names: list[str], rules: PathRules[object]) -> str | None:
    """Returns the rule of a parameter; a tied one may match by any of its names."""
    matches = [match for name in names if (match := rules.match(name))]
    keys = list(dict.fromkeys(match.key for match in matches))
    if len(keys) > 1:
        raise RuleError(
            f"The names {names} are one parameter, but match the rules {keys}: keep one."
        )
    return keys[0] if keys else None


def _layout(key: str, value: Any, session: Session) -> Layout:
    try:
        layout = value.backend_layout if hasattr(value, "axes") else None
        layout = layout or Layout(session.mesh, value)
    except LayoutError as error:
        raise LayoutError(f"Rule {key!r}: {error}", name=key) from None
    if layout.mesh != session.mesh:
        raise LayoutError(
            f"Rule {key!r} is of mesh {layout.mesh}, but the distribution that is set is over "
            f"{session.mesh}: make the layout map on its mesh.",
            name=key,
        )
    return layout


def _refuse_unused(rules: PathRules[object], paths: list[str], module: torch.nn.Module) -> None:
    report = rules.report(paths)
    parameters = ", ".join(name for name, _ in module.named_parameters(remove_duplicate=False))
    for rule in report.unused_rules:
        hint = report.hints.get(rule)
        raise RuleError(
            f"Rule {rule!r} matches no parameter and no output of "
            f"{type(module).__name__}{': ' + hint if hint else ''}. Its parameters are "
            f"{parameters}.",
            name=rule,
        )


@attrs.define(eq=False)
class ModuleEdge:
    """The layouts at the input and output of a torch module, by hooks, as for Keras layers."""

    session: Session
    edges: MutableMapping[torch.nn.Module, "ModuleEdge"]  # of all modules
    output: Layout | None  # the layout that a rule gives it
    _handles: list[Any] = attrs.field(factory=list, init=False)

    def attach(self, module: torch.nn.Module) -> None:
        """Registers the hooks of `module`."""
        self.edges[module] = self
        enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = [enter, module.register_forward_hook(self._leave)]

    def detach(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, _module: torch.nn.Module, args: object, kwargs: object) -> tuple[Any, Any]:
        if keras_private.is_symbolic():
            return args, kwargs
        entered: tuple[Any, Any] = keras_private.map_tensors(self._promote, (args, kwargs))
        return entered

    def _leave(self, _module: torch.nn.Module, _args: object, outputs: object) -> Any:
        if keras_private.is_symbolic():
            return outputs
        what = "The output of a module that a rule names"
        return keras_private.map_tensors(
            lambda tensor: lay_out(tensor, self.output, what, self.session), outputs
        )

    def _promote(self, tensor: torch.Tensor) -> Any:
        """Returns a plain tensor as a replicated one, and reduces the gradient of any tensor."""
        if not self.session.strategy.owns(tensor):
            replicated = Layout.replicated(self.session.mesh, tensor.ndim)
            return self.session.strategy.redistribute(tensor, replicated)
        return self.session.strategy.redistribute(tensor, None)


@contextmanager
def without_edges(
    module: torch.nn.Module, noted: MutableMapping[torch.nn.Module, ModuleEdge]
) -> Iterator[None]:
    """Returns `module` without its edges, for a file."""
    edges = {submodule: noted[submodule] for submodule in module.modules() if submodule in noted}
    for edge in edges.values():
        edge.detach()
    try:
        yield
    finally:
        for submodule, edge in edges.items():
            edge.attach(submodule)


def _check_module(module: object, session: Session) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentProblem(
            name="parallelize_torch_module(module)",
            expected="a torch.nn.Module",
            got=type(module).__name__,
            remedy="give the module itself",
        )
    for name, parameter in module.named_parameters():
        if session.strategy.owns(parameter):
            raise ArgumentProblem(
                f"Parameter {name!r} is already laid out as {session.strategy.layout(parameter)}: "
                "call parallelize_torch_module once, before the module is wrapped.",
                name=name,
            )


def _check_mesh(mesh: Any, session: Session) -> None:
    """Refuses a mesh that differs from the mesh of the distribution."""
    if isinstance(mesh, Mesh):
        same = mesh == session.mesh
    elif hasattr(mesh, "backend_mesh"):  # a Keras DeviceMesh
        same = mesh.backend_mesh == session.world
    else:
        ranks = tuple(mesh.mesh.flatten().tolist())
        same = Mesh(mesh.shape, mesh.mesh_dim_names or ()) == session.mesh
        same = same and ranks == session.world.processes
    if not same:
        raise MeshError(
            f"parallelize_torch_module was given mesh {mesh}, but the distribution that is set is "
            f"over {session.mesh} of processes {session.world.processes}: give that mesh."
        )
