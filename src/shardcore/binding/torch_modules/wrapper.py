"""Patch: `TorchModuleWrapper`, by which Keras and a torch module share sharded parameters."""

import weakref
from contextlib import ExitStack
from typing import Any

import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.engine import torch_state
from shardcore.binding.engine.variable import full_tensor
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, tensor_of
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.torch_modules.parallelize import without_edges
from shardcore.binding.types import Original
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout


@replaces(
    "keras.src.utils.torch_utils:TorchModuleWrapper._track_module_parameters",
    reason="The module and Keras hold the same parameters: both get the sharded ones.",
)
def track(sessions: Sessions, original: Original, wrapper: keras.layers.TorchModuleWrapper) -> None:
    """Replaces `_track_module_parameters`: the module's parameters become Keras variables."""
    session = sessions.current()
    if session is None:
        original(wrapper)
    else:
        _track(wrapper, session)
        wrapper.built = True
    for variable in wrapper.variables:
        variable._shardcore_module = weakref.ref(wrapper.module)


@replaces(
    "keras.src.utils.torch_utils:TorchModuleWrapper.get_config",
    reason="Pickles the module, which holds shards.",
)
def config(sessions: Sessions, original: Original, wrapper: keras.layers.TorchModuleWrapper) -> Any:
    """Replaces `get_config`, which pickles the module: it must hold full plain tensors then."""
    module = wrapper.module
    with (
        without_edges(module, sessions.edges),
        torch_state.holding(module, _full_tensors(module, sessions)),
    ):
        return original(wrapper)


def follow(variable: keras.Variable, parameter: torch.Tensor) -> None:
    """Stores the value of `variable` in the torch module that holds `parameter`, if any."""
    module = getattr(variable, "_shardcore_module", lambda: None)()
    if module is not None:
        torch_state.replace_tensors(module, {id(parameter): tensor_of(variable)})


def buffers(model: keras.Model) -> list[torch.Tensor]:
    """Returns the buffers of the torch modules in a Keras model, which are no Keras variables."""
    kind = keras.layers.TorchModuleWrapper
    wrappers = [layer for layer in keras_private.layers_of(model) if isinstance(layer, kind)]
    return [buffer for wrapper in wrappers for buffer in wrapper.module.buffers()]


def _track(wrapper: keras.layers.TorchModuleWrapper, session: Session) -> None:
    """Lays the module's parameters out by the rules; its buffers are replicated."""
    torch_state.agree(wrapper.module, session)
    stored: dict[int, torch.Tensor] = {}
    for name, parameter in wrapper.module.named_parameters():
        variable = _variable([wrapper.name, *name.split(".")], parameter, session)
        keras_private.track(wrapper, variable)
        stored[id(parameter)] = tensor_of(variable)
    torch_state.replace_tensors(wrapper.module, stored | torch_state.buffers(wrapper, session))


def _variable(names: list[str], parameter: torch.Tensor, session: Session) -> Any:
    """Returns a variable at the path of Keras: the names joined by slashes."""
    layout = session.strategy.layout(parameter)
    with ExitStack() as stack:
        for scope in names[:-1]:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable(
            parameter.detach(),
            trainable=parameter.requires_grad,
            name=names[-1],
            layout=None if layout is None else session.keras_layout(layout),
        )
    if layout is not None:  # laid out by `parallelize_torch_module`, or of a Keras layer
        _refuse_another_layout(variable, layout, session)
        set_tensor(variable, parameter)
    return variable


def _refuse_another_layout(variable: keras.Variable, layout: Layout, session: Session) -> None:
    rule = session.rule(variable.path)
    if rule is None:
        return
    ruled = session.distribution.get_tensor_layout(variable.path).backend_layout
    if ruled != layout:
        raise LayoutError(
            f"Rule {rule.key!r} of the layout map gives {variable.path!r} the layout {ruled}, but "
            f"the parameter is already laid out as {layout}: keep one of the two rules.",
            name=rule.key,
        )


def _full_tensors(
    module: torch.nn.Module, sessions: Sessions
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the sharded tensors of `module`, each with its full tensor. A collective."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in [*module.parameters(), *module.buffers()]:
        if sessions.strategy_of_tensor(tensor) is None:
            continue
        value = full_tensor(tensor, sessions)
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        pairs.append((tensor, value))
    return pairs
