"""`parallelize_torch_module`: a plain torch module, laid out by rules as a layout map's."""

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.binding import seams, torch_state
from shardcore.binding.layers import lay_out
from shardcore.binding.layout_map import rules_of
from shardcore.binding.session import Session, Sessions
from shardcore.domain.errors import LayoutError, MeshError, RuleError, StrategyError
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.paths.rules import PathRules


def parallelize(module: Any, mesh: Any, rules: Any, sessions: Sessions) -> Any:
    """Lay `module` out in place. All ranks call it together."""
    session = sessions.required()
    _check_mesh(mesh, session)
    _check_module(module, session)
    by_path = rules_of(rules) if hasattr(rules, "_layout_map") else PathRules(rules)
    plan = _Plan(module, by_path, session, sessions.edges)
    if session.mesh.size == 1:
        return module
    torch_state.agree(module, session)
    for each in module.modules():
        plan.lay_out(each)
    torch_state.replace_tensors(module, plan.stored)
    return module


@attrs.define(eq=False)
class ModuleEdge:
    """What `binding.layers` does for a Keras layer, for a torch module, by its hooks.

    Args:
        session: Whose strategy lays tensors out.
        edges: Where those of all modules are noted.
        output: The layout that a rule gives the output, if any.
    """

    session: Session
    edges: MutableMapping[torch.nn.Module, "ModuleEdge"]
    output: Layout | None
    _handles: list[Any] = attrs.field(factory=list, init=False)

    def attach(self, module: torch.nn.Module) -> None:
        """Go to work on `module`."""
        self.edges[module] = self
        enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = [enter, module.register_forward_hook(self._leave)]

    def detach(self) -> None:
        """Leave the module as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if seams.is_symbolic():
            return args, kwargs
        entered: tuple[Any, Any] = seams.map_tensors(self._promoted, (args, kwargs))
        return entered

    def _leave(self, _module: Any, _args: Any, outputs: Any) -> Any:
        if seams.is_symbolic():
            return outputs
        what = "The output of a module that a rule names"
        return seams.map_tensors(
            lambda each: lay_out(each, self.output, what, self.session), outputs
        )

    def _promoted(self, tensor: Any) -> Any:
        """A plain tensor as a replicated one; the gradient of any comes out without a sum."""
        if not self.session.strategy.owns(tensor):
            replicated = Layout.replicated(self.session.mesh, tensor.ndim)
            return self.session.strategy.activation(tensor, replicated)
        return self.session.strategy.activation(tensor, None)


@contextmanager
def without_edges(
    module: torch.nn.Module, noted: MutableMapping[torch.nn.Module, ModuleEdge]
) -> Iterator[None]:
    """`module` without its edges, as a file should have it."""
    edges = {each: noted[each] for each in module.modules() if each in noted}
    for edge in edges.values():
        edge.detach()
    try:
        yield
    finally:
        for each, edge in edges.items():
            edge.attach(each)


@attrs.frozen(eq=False)
class _Plan:
    """Which layout each parameter and each output of a module gets, and what has been laid out.

    Args:
        module: The module.
        rules: Layouts by names; parameters without a rule are replicated.
        session: Whose strategy keeps the tensors.
        edges: Where the edges of all modules are noted.

    Attributes:
        layouts: By the `id` of a parameter.
        outputs: By the module that gives the output.
        stored: Where what is laid out goes, by the `id` of the tensor that it replaces.

    Raises:
        RuleError: If a rule matches nothing, or several rules match one parameter.
        LayoutError: If a layout does not fit.
    """

    module: torch.nn.Module
    rules: PathRules[Any]
    session: Session
    edges: Any
    layouts: dict[int, Layout] = attrs.field(factory=dict, init=False)
    outputs: dict[torch.nn.Module, Layout] = attrs.field(factory=dict, init=False)
    stored: dict[int, torch.Tensor] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        names: dict[int, list[str]] = defaultdict(list)  # a tied parameter has several
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        for parameter in self.module.parameters():
            key = self._key(names[id(parameter)])
            if key is not None:
                self.layouts[id(parameter)] = self._layout(key, tuple(parameter.shape))
        ruled = []
        for name, each in self.module.named_modules():
            match = self.rules.match(_output(name))
            if match is not None:
                self.outputs[each] = self._layout(match.key, None)
                ruled.append(_output(name))
        self._refuse_unused([name for each in names.values() for name in each], ruled)

    def lay_out(self, module: torch.nn.Module) -> None:
        """Lay out what `module`, which is one of the tree, has itself, and pin its edges."""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in self.stored:  # a tied one is laid out once
                layout = self.layouts.get(id(tensor))
                self.stored[id(tensor)] = torch_state.stored(tensor, layout, self.session)
        ModuleEdge(self.session, self.edges, self.outputs.get(module)).attach(module)

    def _key(self, names: list[str]) -> str | None:
        """The rule of a parameter, which a tied one may match by any of its names."""
        matches = [match for name in names if (match := self.rules.match(name))]
        keys = list(dict.fromkeys(match.key for match in matches))
        if len(keys) > 1:
            raise RuleError(
                f"The names {names} are one parameter, but match the rules {keys}: keep one."
            )
        return keys[0] if keys else None

    def _layout(self, key: str, shape: tuple[int, ...] | None) -> Layout:
        value = self.rules[key]
        try:
            layout = value.backend_layout if hasattr(value, "axes") else None
            layout = layout or Layout(self.session.mesh, value)
        except LayoutError as error:
            raise LayoutError(f"Rule {key!r}: {error}") from None
        if layout.mesh != self.session.mesh:
            raise LayoutError(
                f"Rule {key!r} is of mesh {layout.mesh}, but the distribution that is set is over "
                f"{self.session.mesh}: make the layout map on its mesh."
            )
        if shape is None:
            return layout
        return layout.fitting(shape, f"Rule {key!r}: the parameter")

    def _refuse_unused(self, paths: list[str], outputs: list[str]) -> None:
        report = self.rules.report([*paths, *outputs])
        for rule in report.unused_rules:
            hint = report.hints.get(rule)
            raise RuleError(
                f"Rule {rule!r} matches no parameter and no output of "
                f"{type(self.module).__name__}{': ' + hint if hint else ''}. Its parameters are "
                f"{', '.join(paths)}."
            )


def _output(name: str) -> str:
    """The path of a module's output, as of a Keras layer's."""
    return f"{name}.output" if name else "output"


def _check_module(module: Any, session: Session) -> None:
    if not isinstance(module, torch.nn.Module):
        raise StrategyError(
            f"parallelize_torch_module takes a torch.nn.Module, got {type(module).__name__}: give "
            "the module itself."
        )
    for name, parameter in module.named_parameters():
        if session.strategy.owns(parameter):
            raise StrategyError(
                f"Parameter {name!r} is already laid out as {session.strategy.layout(parameter)}: "
                "call parallelize_torch_module once, before the module is wrapped."
            )


def _check_mesh(mesh: Any, session: Session) -> None:
    """Refuse a mesh that is not the one of the distribution that is set."""
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
