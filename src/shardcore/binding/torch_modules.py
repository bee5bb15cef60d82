"""Torch modules: laid out by the rules of a layout map, alone or in a `TorchModuleWrapper`."""

import weakref
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from keras import Model, Variable, name_scope
from keras.distribution import LayoutMap
from keras.layers import TorchModuleWrapper

from shardcore.binding import keras_private
from shardcore.binding.engine import torch_state
from shardcore.binding.engine.variable import full_tensor
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, tensor_of
from shardcore.binding.layouts import rules_of
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.training.calls import lay_out
from shardcore.binding.types import Original
from shardcore.domain.errors import ArgumentProblem, LayoutError, MeshError, RuleError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import Match, PathRules
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
    stored = {
        id(tensor): torch_state.store_tensor(tensor, name, layouts.get(id(tensor)), session)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    torch_state.replace_tensors(module, stored)
    for submodule in module.modules():
        _ModuleEdge(session, sessions.edges, outputs.get(submodule)).attach(submodule)
    return module


def _layouts(
    module: torch.nn.Module, rules: PathRules[Any], session: Session
) -> tuple[dict[int, Layout], dict[torch.nn.Module, Layout]]:
    """Looks up the layouts of parameters, by `id`, and of outputs, by module."""
    names: dict[int, list[str]] = defaultdict(list)  # a tied parameter has several
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    layouts: dict[int, Layout] = {}
    for parameter in module.parameters():
        if match := _rule_of(names[id(parameter)], rules):
            layout = _layout(match.key, match.value, session)
            what = f"Rule {match.key!r}: the parameter"
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


def _rule_of(names: list[str], rules: PathRules[Any]) -> Match[Any] | None:
    """Finds the rule of a parameter; a tied one may match by any of its names."""
    matches = {match.key: match for name in names if (match := rules.match(name))}
    if len(matches) > 1:
        raise RuleError(
            f"The names {names} are one parameter, but match the rules {[*matches]}: keep one."
        )
    return next(iter(matches.values()), None)


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
class _ModuleEdge:
    """The layouts at the input and output of a torch module, by hooks, as for Keras layers."""

    session: Session
    edges: MutableMapping[torch.nn.Module, "_ModuleEdge"]  # of all modules
    output: Layout | None  # the layout that a rule gives it
    _handles: list[Any] = attrs.field(factory=list, init=False)

    def attach(self, module: torch.nn.Module) -> None:
        self.edges[module] = self
        enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = [enter, module.register_forward_hook(self._leave)]

    def detach(self) -> None:
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
        """Replicates a plain tensor, and reduces the gradient of any."""
        if not self.session.strategy.owns(tensor):
            replicated = Layout.replicated(self.session.mesh, tensor.ndim)
            return self.session.strategy.redistribute(tensor, replicated)
        return self.session.strategy.redistribute(tensor, None)


@contextmanager
def _without_edges(
    module: torch.nn.Module, noted: MutableMapping[torch.nn.Module, _ModuleEdge]
) -> Iterator[None]:
    """Detaches the edges of `module` in a context: they cannot be pickled."""
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


@replaces(
    "keras.src.utils.torch_utils:TorchModuleWrapper._track_module_parameters",
    reason="The module and Keras hold the same parameters: both get the sharded ones.",
)
def track(sessions: Sessions, original: Original, wrapper: TorchModuleWrapper) -> None:
    """Replaces `_track_module_parameters`: parameters become variables; buffers are replicated."""
    session = sessions.current()
    if session is None:
        original(wrapper)
    else:
        torch_state.agree(wrapper.module, session)
        stored: dict[int, torch.Tensor] = {}
        for name, parameter in wrapper.module.named_parameters():
            variable = _variable([wrapper.name, *name.split(".")], parameter, session)
            keras_private.track(wrapper, variable)
            stored[id(parameter)] = tensor_of(variable)
        stored |= torch_state.buffers(wrapper, session)
        torch_state.replace_tensors(wrapper.module, stored)
        wrapper.built = True
    for variable in wrapper.variables:
        variable._shardcore_module = weakref.ref(wrapper.module)


@replaces(
    "keras.src.utils.torch_utils:TorchModuleWrapper.get_config",
    reason="Pickles the module, which holds shards.",
)
def config(sessions: Sessions, original: Original, wrapper: TorchModuleWrapper) -> Any:
    """Replaces `get_config`, which pickles the module: it must hold full plain tensors then."""
    module = wrapper.module
    with (
        _without_edges(module, sessions.edges),
        torch_state.holding(module, _full_tensors(module, sessions)),
    ):
        return original(wrapper)


def follow(variable: Variable, parameter: torch.Tensor) -> None:
    """Stores the value of `variable` in the torch module that holds `parameter`, if any."""
    module = getattr(variable, "_shardcore_module", lambda: None)()
    if module is not None:
        torch_state.replace_tensors(module, {id(parameter): tensor_of(variable)})


def buffers(model: Model) -> list[torch.Tensor]:
    """Lists the buffers of the torch modules in a Keras model, which are no Keras variables."""
    layers = keras_private.layers_of(model)
    wrappers = [layer for layer in layers if isinstance(layer, TorchModuleWrapper)]
    return [buffer for wrapper in wrappers for buffer in wrapper.module.buffers()]


def _variable(names: list[str], parameter: torch.Tensor, session: Session) -> Any:
    """Creates a variable at the path of Keras: the names joined by slashes."""
    layout = session.strategy.layout(parameter)
    with ExitStack() as stack:
        for scope in names[:-1]:
            stack.enter_context(name_scope(scope))
        variable = Variable(
            parameter.detach(),
            trainable=parameter.requires_grad,
            name=names[-1],
            layout=None if layout is None else session.keras_layout(layout),
        )
    if layout is not None:  # laid out by `parallelize_torch_module`, or of a Keras layer
        _refuse_another_layout(variable, layout, session)
        set_tensor(variable, parameter)
    return variable


def _refuse_another_layout(variable: Variable, layout: Layout, session: Session) -> None:
    rule = session.rule(variable.path)
    if rule is None:
        return
    ruled = rule.value.backend_layout
    if ruled != layout:
        raise LayoutError(
            f"Rule {rule.key!r} of the layout map gives {variable.path!r} the layout {ruled}, but "
            f"the parameter is already laid out as {layout}: keep one of the two rules.",
            name=rule.key,
        )


def _full_tensors(
    module: torch.nn.Module, sessions: Sessions
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All-gathers the sharded tensors of `module`: pairs of a tensor and its full one."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in [*module.parameters(), *module.buffers()]:
        if sessions.strategy_of_tensor(tensor) is None:
            continue
        value = full_tensor(tensor, sessions)
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        pairs.append((tensor, value))
    return pairs
